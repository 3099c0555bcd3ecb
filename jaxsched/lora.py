"""What users say of low-rank adapters (LoRA). Names as in vLLM."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """An adapter: a folder that PEFT has saved, and how the engine knows it.

    Raises ValueError for values of a wrong kind. The folder is read when the adapter is loaded.
    """

    lora_name: str  # for messages
    lora_int_id: int  # from 1; names the adapter, so each has its own
    lora_path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name is {self.lora_name!r}; it must be a string that is not empty")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"lora_int_id is {number!r}; it must be an integer of at least 1")
        if not isinstance(self.lora_path, str | os.PathLike) or not os.fspath(self.lora_path):
            raise ValueError(f"lora_path is {self.lora_path!r}; it must be the path of a folder")
        object.__setattr__(self, "lora_path", os.fspath(self.lora_path))

    def __str__(self) -> str:
        return f"adapter {self.lora_int_id} ({self.lora_name!r})"
