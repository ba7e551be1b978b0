"""The job spec: what a person asks for, and how a text becomes one.

Read `models.py` (the fields), `kinds.py` (those of models and data) and `optimizers.py`, then `reading.py` (text to
`JobSpec`), `problems.py` (what is said of a wrong one) and `paths.py` (where a spec may point). Must not import torch,
ray or `server`; `ruamel.yaml` is loaded on first use.
"""

from workers.spec.kinds import (
    BpeTokenizer,
    CharTokenizer,
    DataSpec,
    DigitsData,
    FileTokenizer,
    GptModel,
    MlpModel,
    ModelSpec,
    PythonModel,
    TextData,
    TokensData,
)
from workers.spec.models import (
    CheckpointSpec,
    ConstantSchedule,
    CosineSchedule,
    EvalSpec,
    JobSpec,
    ResourceSpec,
    RestartSpec,
    TrainSpec,
    ZeroSpec,
)
from workers.spec.optimizers import AdamSpec, AdamWSpec, LionSpec, OptimizerSpec, SGDSpec
from workers.spec.paths import path_problems, resolve_paths
from workers.spec.problems import SpecError, SpecProblem, SpecTooLarge, problems_of
from workers.spec.reading import load_spec, parse_document, parse_spec, read_spec_file

__all__ = [
    "AdamSpec",
    "AdamWSpec",
    "BpeTokenizer",
    "CharTokenizer",
    "CheckpointSpec",
    "ConstantSchedule",
    "CosineSchedule",
    "DataSpec",
    "DigitsData",
    "EvalSpec",
    "FileTokenizer",
    "GptModel",
    "JobSpec",
    "LionSpec",
    "MlpModel",
    "ModelSpec",
    "OptimizerSpec",
    "PythonModel",
    "ResourceSpec",
    "RestartSpec",
    "SGDSpec",
    "SpecError",
    "SpecProblem",
    "SpecTooLarge",
    "TextData",
    "TokensData",
    "TrainSpec",
    "ZeroSpec",
    "load_spec",
    "parse_document",
    "parse_spec",
    "path_problems",
    "problems_of",
    "read_spec_file",
    "resolve_paths",
]
