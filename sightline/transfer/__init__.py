"""What an encoder is good for: fine-tuning."""
