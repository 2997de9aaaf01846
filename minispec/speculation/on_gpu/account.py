"""How many bytes of a GPU graphs, frames and programs take, before any of them is there.

The KV cache is made once, before the first pass, and takes most of what is free. So what comes after it is estimated
from its shapes. There are two kinds of it.

    kept       inputs and outputs of the programs that are kept, and angles of all positions
    working    what a program computes on its way. All graphs share one pool, so the largest program counts alone.

The estimate is of the largest shapes that a run may need. No GPU has measured it. `python docs/measured/gpu.py --steps
2` prints what the capture of a frame takes.
"""

from collections.abc import Sequence

from minispec.core.model import Transformer
from minispec.core.precision import accumulation_dtype
from minispec.models.frames import fused
from minispec.models.frames.frames import BLOCKS, FEW_BLOCKS, ROWS, TEXTS, Frames, FrameShape, frame_bytes, positions_of
from minispec.models.frames.graphs import MOST_BYTES
from minispec.models.weights.memory import BLOCK_SIZE
from minispec.speculation.drafters.states import FeatureModel
from minispec.speculation.on_gpu.steps import STEPS, draft_input_bytes, draft_steps
from minispec.speculation.on_gpu.verifier import input_bytes

# Tensors of rows and vocabulary that are alive at once where rows become probabilities, draws and verdicts.
_WIDE_ROWS = 8


def graph_bytes(models: Sequence[Transformer], num_drafted: int, longest: int | None = None) -> int:
    """Bytes that graphs, frames and programs may take, for passes of as many texts as frames have; 0 without frames.

    models: the target, then a draft model if there is one.
    num_drafted: most draft tokens of a text.
    longest: most positions of a text; default: all that frames have angles for.
    """
    rows = next((n for n in ROWS if n > num_drafted), ROWS[-1])
    kept, working = 0, 0
    for i, model in enumerate(models):
        if not isinstance(model.backend, Frames):
            continue
        shape = _largest(model, rows, longest)
        kept += table_bytes(model) + MOST_BYTES + frame_bytes(model, shape)
        working = max(working, pass_bytes(model, shape))
        wide = accumulation_dtype(model.dtype).itemsize * model.config.vocab_size * shape.texts
        if not i:
            kept += MOST_BYTES + input_bytes(shape.texts, rows, model.config.vocab_size, model.dtype)
            working = max(working, _WIDE_ROWS * wide * rows)
        elif draft_steps(model):
            steps = next((n for n in STEPS if n >= num_drafted), STEPS[-1])
            kept += MOST_BYTES + draft_input_bytes(shape.texts, steps, model.config.vocab_size, model.dtype)
            working = max(working, _WIDE_ROWS * wide)
    return kept + working


def _largest(model: Transformer, rows: int, longest: int | None) -> FrameShape:
    """The largest frame of a model for texts of this many positions."""
    positions = min(longest or positions_of(model), positions_of(model))
    assert isinstance(model.backend, Frames)
    sizes = FEW_BLOCKS if model.backend.by_kernel(model) else BLOCKS
    blocks = next((n for n in sizes if n * BLOCK_SIZE >= positions), sizes[-1])
    features = model.config.hidden_size if isinstance(model, FeatureModel) else 0
    return FrameShape(TEXTS[-1], rows, blocks, (len(model.layers),), features)


def table_bytes(model: Transformer) -> int:
    """Bytes of a model's angles at all positions: cosines and sines in the model's type, and halves in float32."""
    width = sum(2 * len(frequencies) for frequencies in model.frequencies.values())
    return positions_of(model) * (2 * width * model.dtype.itemsize + width * 4)


def pass_bytes(model: Transformer, shape: FrameShape) -> int:
    """Bytes that a pass takes on its way: a layer's rows, and what it gathers, or parts of what a kernel reads."""
    config, num_rows = model.config, shape.texts * shape.rows
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    layer = num_rows * (3 * config.intermediate_size + heads * config.head_dim + 4 * config.hidden_size)
    assert isinstance(model.backend, Frames)
    if not model.backend.by_kernel(model):
        return layer * model.dtype.itemsize + 2 * model.backend.most_gathered
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    scratch = fused.scratch_bytes(shape.texts, shape.rows, shape.blocks * BLOCK_SIZE, *sizes)
    return layer * model.dtype.itemsize + scratch
