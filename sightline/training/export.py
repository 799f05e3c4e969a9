"""What a checkpoint holds beside the weights of the training: what others load.

That is the objective's business, `export(folder, encoder)`. What most of them leave is the encoder, which `run:FOLDER`
loads, and the decoder and the projection head of those that have them.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save

from sightline.core.files import write_atomically
from sightline.encoders.encoder import Encoder, build_encoder
from sightline.encoders.modules.mae_decoder import Decoder
from sightline.encoders.modules.projection import save_head
from sightline.encoders.saved import save_encoder
from sightline.training.checkpoints import tensors_of


def export_encoder(objective: Any, folder: Path, encoder: Encoder) -> None:
    """What `run:FOLDER` loads: the encoder of an objective, and the decoder and the head of those that have them."""
    save_encoder(as_encoder(objective, encoder), folder)
    decoder = objective.saved_decoder()
    if decoder is not None:
        weights = {key: value.cpu().contiguous() for key, value in tensors_of(decoder).items()}
        write_atomically(folder / "decoder.safetensors", save(weights))
    if isinstance(decoder, Decoder):  # that of FCMAE has no layers to look at, and is not built again
        write_atomically(folder / "decoder.json", json.dumps(decoder.describe(), indent=2).encode())
    if head := objective.head_of(objective.encoder):
        save_head(head, folder)


def as_encoder(objective: Any, encoder: Encoder) -> Encoder:
    """The encoder of an objective as it is now; `encoder` says how it is called, built and used."""
    return build_encoder(
        objective.encoder,
        reference=encoder.reference,
        name=encoder.name,
        preprocess=encoder.preprocess,
        architecture=encoder.architecture,
        classes=encoder.classes,
        resize=encoder.resize,
    )
