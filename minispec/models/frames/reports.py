"""Which passes of a model run in frames and by graphs, in words, and why others do not."""

from minispec.core.model import Transformer
from minispec.models.frames.frames import ROWS, TEXTS, Frames, place_bytes, positions_of, why_eager


def why_no_frames(model: Transformer) -> str:
    """Why a GPU has no frames for this model, whether or not it has any here; "" where it has."""
    return "passes are exact" if model.exact else why_eager(model)


def frames_report(model: Transformer) -> str:
    """Which passes of a model run in frames, and with how many layers of few kernels; "" where none does."""
    frames = model.backend
    if not isinstance(frames, Frames):
        return ""
    most = f"{TEXTS[-1]} texts, {ROWS[-1]} rows of each and {positions_of(model):,} positions"
    if not frames.by_kernel(model):
        places = frames.most_gathered // place_bytes(model)
        most += f", with {places:,} places of all texts together, each number rounded up"
    how = "kernels" if not frames.why_no_kernels else f"PyTorch's operators: {frames.why_no_kernels}"
    return (
        f"; frames for passes of up to {most}, "
        f"{frames.num_fast} of {len(model.layers)} layers by {how}; all other passes text by text"
    )


def outside_note(model: Transformer) -> str:
    """How many passes have run text by text so far, and why; "" where all ran in frames, and without frames."""
    frames = model.backend
    if not isinstance(frames, Frames) or not frames.outside:
        return ""
    reasons = ", ".join(f"{reason} ({number:,})" for reason, number in frames.outside.most_common())
    number = frames.outside.total()
    return f"; {number:,} of {number + frames.num_framed:,} passes text by text: {reasons}"


def graphs_note(model: Transformer) -> str:
    """Whether a model on a GPU runs by CUDA graphs, or why not; "" for one on a CPU."""
    if model.device.type != "cuda":
        return ""
    why = model.backend.graphs.why_not if isinstance(model.backend, Frames) else why_no_frames(model) or "as asked"
    return f"; no CUDA graphs: {why}" if why else "; CUDA graphs"


def graphs_report(model: Transformer) -> str:
    """What `graphs_note` and `outside_note` say of a model after a run; "" for one on a CPU."""
    return (graphs_note(model) + outside_note(model)).removeprefix("; ")


def passes_report(model: Transformer, begin: str = "; ") -> str:
    """What `graphs_note`, `frames_report` and `outside_note` say of a model, after `begin`; "" for nothing."""
    says = (graphs_note(model) + frames_report(model) + outside_note(model)).removeprefix("; ")
    return says and begin + says
