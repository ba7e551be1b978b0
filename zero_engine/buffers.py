"""Buffers are never cast, moved or reduced; what training forward writes into them depends on the ranks."""

from __future__ import annotations

from torch import nn

from zero_engine.errors import ModelError


class BufferWatch:
    """Sees whether training forward changes a buffer (BatchNorm), which would depend on the number of ranks."""

    def __init__(self, module: nn.Module, allowed: bool) -> None:
        self._buffers = {} if allowed else dict(module.named_buffers())
        self._versions: dict[str, int] = {}

    def remember(self) -> None:
        """Before forward."""
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}

    def check(self) -> None:
        """After forward. Raises ModelError naming the buffer."""
        for name, buffer in self._buffers.items():
            if buffer._version != self._versions[name]:
                raise ModelError(
                    f"training changes buffer '{name}', so its value would depend on the number of ranks; use another "
                    'module (GroupNorm), or buffers="local" to give up equal bits'
                )
