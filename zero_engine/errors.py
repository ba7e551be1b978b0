"""The engine's error tree: every mistake a user can make has a class, a code and a sentence on what to change."""


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose. `code` never changes once released."""

    code = "engine_error"


class ConfigError(EngineError):
    """A setting that cannot work; the text names the field and the nearest valid value."""

    code = "config_invalid"


class ModelError(EngineError):
    """A model that the engine cannot train exactly; the text names the parameter, buffer or module."""

    code = "model_unsupported"


class UsageError(EngineError):
    """Calls in an order that has no meaning (a step before its micro-batches, a second backward after the last)."""

    code = "engine_misused"


class DivergedError(EngineError):
    """Ranks that should do the same did not: other initial weights, other modules, another call."""

    code = "ranks_diverged"


class PeerError(EngineError):
    """Another rank ended or failed; the text carries its rank and its first error when that is known."""

    code = "peer_lost"


class NonFiniteError(EngineError):
    """A loss or gradient was not finite and the policy is to stop; parameters and moments are as before the step."""

    code = "non_finite"
