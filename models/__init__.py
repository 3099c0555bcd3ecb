"""Model definitions. Import as ``jaxsched.models``."""

if not __name__.startswith("jaxsched."):
    raise ImportError(
        "this folder is part of jaxsched and must be imported as 'jaxsched.models', not as a top-level 'models'; "
        "run from another folder or install the package"
    )

from .config import LayerConfig, ModelConfig
from .decoder import Decoder
from .registry import Family, family_of, supported_architectures
from .rope import RopeConfig

__all__ = [
    "Decoder",
    "Family",
    "LayerConfig",
    "ModelConfig",
    "RopeConfig",
    "family_of",
    "supported_architectures",
]
