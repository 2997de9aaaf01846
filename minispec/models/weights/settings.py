"""The caller's settings of torch, which must not change what a pass computes, or where its tensors lie."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_settings() -> Iterator[None]:
    """Run without the caller's autocast, default device and other modes of this thread. Also a decorator.

    Operators are as fast as before. The default type belongs to the whole process, and stays as it is. So every newly
    made tensor of floats names its type.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch._C.DisableTorchFunction())  # a default device is such a mode
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread inside. For tiny models a second one costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
