"""The relative positions of an encoder that is going to be trained: a table in each block instead of one for all.

The official codes of SimMIM and BEiT pre-train one table that all blocks share, and fine-tune a copy of it in each
block, which learns at the rate of its block. A block adds its copy where it added the shared one, so that the outputs
are the same until the first step.
"""

import copy
from dataclasses import replace
from typing import Any

from timm.models.beit import Beit
from torch import nn

from sightline.core.references import parse_reference
from sightline.encoders.encoder import Encoder, build_encoder

SHARED, OWN = "use_shared_rel_pos_bias", "use_rel_pos_bias"  # timm's options


def own_tables(encoder: Encoder) -> Encoder:
    """A copy of a Beit whose blocks share a table of relative positions, with a table in each; others as they are.

    >>> from sightline import load_encoder
    >>> tables = "use_rel_pos_bias=False&use_shared_rel_pos_bias=True"
    >>> own_tables(load_encoder(f"timm:beit_base_patch16_224@random?depth=2&{tables}")).architecture
    'timm:beit_base_patch16_224@random?depth=2&use_rel_pos_bias=True&use_shared_rel_pos_bias=False'
    """
    if not isinstance(encoder.module, Beit) or encoder.module.rel_pos_bias is None or encoder.architecture is None:
        return encoder
    module: Any = copy.deepcopy(encoder.module)
    shared = module.rel_pos_bias
    for block in module.blocks:
        _give_table(block.attn, shared)
    module.rel_pos_bias = None
    built = parse_reference(encoder.architecture)
    return build_encoder(
        module,
        reference=encoder.reference,
        name=encoder.name,
        preprocess=encoder.preprocess,
        architecture=str(replace(built, options=built.options | {OWN: "True", SHARED: "False"})),
        classes=encoder.classes,
        notes=encoder.notes,
        resize=encoder.resize,
    )


def _give_table(attention: Any, shared: Any) -> None:
    """Let a block add a copy of a shared table, as timm builds it; a table that it has already takes the other in."""
    table = shared.relative_position_bias_table.detach()
    if attention.relative_position_bias_table is not None:
        attention.relative_position_bias_table.data.add_(table)
        return
    attention.window_size, attention.num_relative_distance = shared.window_size, len(table)
    attention.relative_position_bias_table = nn.Parameter(table.clone())
    del attention.relative_position_index  # None, in the place of the buffer
    attention.register_buffer("relative_position_index", shared.relative_position_index.clone(), persistent=False)
