"""Buffers are never cast, moved or reduced; what training forward writes into them depends on the ranks."""

from __future__ import annotations

from torch import Tensor, nn

from zero_engine.errors import ModelError


class BufferWatch:
    """Sees whether training forward changes a buffer (BatchNorm), which would depend on the number of ranks."""

    def __init__(self, module: nn.Module, allowed: bool) -> None:
        self._places = list[tuple[str, dict[str, Tensor | None], str]]()  # name, who holds it, under which name
        for path, each in [] if allowed else module.named_modules():
            self._places += [(f"{path}.{name}".lstrip("."), each._buffers, name) for name in each._buffers]

    def remember(self) -> None:
        """Before forward."""
        self._before = [_now(holder.get(name)) for _, holder, name in self._places]

    def check(self) -> None:
        """After forward, which may fill what was None (a cache). Raises ModelError naming the buffer."""
        for (path, holder, name), before in zip(self._places, self._before, strict=True):
            buffer, version = _now(holder.get(name))
            if before[0] is not None and (buffer is not before[0] or version != before[1]):
                raise ModelError(
                    f"training changes buffer '{path}', so its value would depend on the number of ranks; use another "
                    'module (GroupNorm), or buffers="local" to give up equal bits'
                )


def _now(buffer: Tensor | None) -> tuple[Tensor | None, int]:
    """Which it is, and how often it was written."""
    return buffer, -1 if buffer is None else buffer._version
