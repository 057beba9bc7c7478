"""Links between a device and its host, as a mover sees them: bytes out, bytes in.

Both directions may be used at once, each by one thread. `EmulatedLink` moves real bytes between
two places in ordinary memory and keeps each direction at its bandwidth, so that order, overlap and
content can be tested without an accelerator; what it cannot show is how a real device shares its
memory bandwidth with kernels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from slurm_ft.switch.pace import Pace, Unlimited

# Large enough for a link's full speed, small enough that two transfers interleave.
PIECE_BYTES = 8 << 20


class Link(Protocol):
    """Moves flat byte tensors. Both calls return when the bytes have arrived."""

    def outward(self, host: Tensor, device: Tensor) -> None:
        """Device to host."""
        ...

    def inward(self, device: Tensor, host: Tensor) -> None:
        """Host to device."""
        ...

    def host(self, nbytes: int) -> Tensor:
        """Host memory that this link moves at full speed."""
        ...

    def spare(self, nbytes: int, like: Tensor) -> Tensor:
        """Device memory beside ``like``, touched, so that its first use costs nothing."""
        ...


class EmulatedLink:
    """Memory to memory. A piece takes as long as its direction's pace says, or longer."""

    def __init__(
        self, out: Pace | None = None, inwards: Pace | None = None, piece: int = PIECE_BYTES
    ) -> None:
        self._out = out or Unlimited()
        self._in = inwards or Unlimited()
        self._piece = piece

    def outward(self, host: Tensor, device: Tensor) -> None:
        """See `Link`."""
        self._move(host, device, self._out)

    def inward(self, device: Tensor, host: Tensor) -> None:
        """See `Link`."""
        self._move(device, host, self._in)

    def host(self, nbytes: int) -> Tensor:
        """See `Link`."""
        return _touched(nbytes)

    def spare(self, nbytes: int, like: Tensor) -> Tensor:
        """See `Link`."""
        return _touched(nbytes)

    def _move(self, target: Tensor, source: Tensor, pace: Pace) -> None:
        for begin, end in _pieces(len(source), self._piece):
            until = pace.book(end - begin)
            target[begin:end].copy_(source[begin:end])
            # What the copy itself took is part of the transfer, not on top of it.
            time.sleep(max(0.0, until - time.monotonic()))


class CudaLink:
    """A GPU and pinned host memory, one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def outward(self, host: Tensor, device: Tensor) -> None:
        """See `Link`. Waits for kernels that were queued before, which may still write."""
        self._move(host, device, self._out)

    def inward(self, device: Tensor, host: Tensor) -> None:
        """See `Link`. Waits for kernels that were queued before, which may still read."""
        self._move(device, host, self._in)

    def host(self, nbytes: int) -> Tensor:
        """See `Link`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def spare(self, nbytes: int, like: Tensor) -> Tensor:
        """See `Link`."""
        # An optimizer keeps its step counts in host memory, and refuses them elsewhere.
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)

    def _move(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            moved = stream.record_event()
        # In a mover's thread, so nothing but this transfer waits; the GIL is free meanwhile.
        moved.synchronize()


def _touched(nbytes: int) -> Tensor:
    # Zeros that were only promised by the kernel would be paid for at the first copy.
    return torch.empty(nbytes, dtype=torch.uint8).fill_(0)


def _pieces(total: int, piece: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, total, piece):
        yield begin, min(begin + piece, total)
