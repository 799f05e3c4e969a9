"""The small encoders that most tests use."""

# A ViT of two blocks on 32 pixels; options may be added: SMALL + "&seed=1".
SMALL = "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&depth=2&embed_dim=48&num_heads=3"

# Sizes of a ViT of transformers.
HUGGINGFACE = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
}
