"""An independent DeepSeek-V4 in NumPy float64: the reference of the test suite."""

from .checkpoint import read_checkpoint, save_checkpoint, tensor_shapes
from .config import Config
from .model import Oracle, State, StepOut
from .mtp import Mtp, MtpOut, MtpState, mtp_logits
from .random import random_checkpoint

__all__ = [
    "Config",
    "Mtp",
    "MtpOut",
    "MtpState",
    "Oracle",
    "State",
    "StepOut",
    "mtp_logits",
    "random_checkpoint",
    "read_checkpoint",
    "save_checkpoint",
    "tensor_shapes",
]
