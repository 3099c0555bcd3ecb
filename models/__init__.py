"""Model definitions. Import as ``jaxsched.models``."""

if not __name__.startswith("jaxsched."):
    raise ImportError(
        "this folder is part of jaxsched and must be imported as 'jaxsched.models', not as a top-level 'models'; "
        "run from another folder or install the package"
    )

from .config import ModelConfig, RopeConfig
from .decoder import Decoder
from .registry import family_of, supported_architectures

__all__ = ["Decoder", "ModelConfig", "RopeConfig", "family_of", "supported_architectures"]
