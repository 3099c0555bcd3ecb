"""The GPUs that are compiled for, described as XLA's compiler wants to know them. Numbers from NVIDIA's data sheets."""

from __future__ import annotations

import dataclasses

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CUDA, CUDNN = (13, 0, 0), (9, 10, 0)  # versions that the compiler may assume


@dataclasses.dataclass(frozen=True)
class Target:
    """One GPU. ``shared_block`` is the most shared memory that one thread block may ask for."""

    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    memory: int  # bytes
    bandwidth: float  # bytes per second
    l2: int  # bytes
    clock: float  # GHz
    shared_core: int  # bytes of shared memory of one multiprocessor
    shared_block: int
    lanes: int = 128  # float32 units of one multiprocessor
    threads_core: int = 2048
    accelerated: bool = False  # whether the instructions of this very generation (sm_90a) may be used

    @property
    def family(self) -> str:
        """Such as "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def describe(self) -> str:
        """The text form of XLA's GpuTargetConfigProto."""
        device: dict[str, object] = {
            "name": f'"{self.name}"',
            "device_vendor": '"NVIDIA Corporation"',
            "device_memory_size": self.memory,
            "memory_bandwidth": int(self.bandwidth),
            "l2_cache_size": self.l2,
            "clock_rate_ghz": self.clock,
            "core_count": self.cores,
            "fpus_per_core": self.lanes,
            "threads_per_core_limit": self.threads_core,
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_core": self.shared_core,
            "shared_memory_per_block": 48 * KIB,
            "shared_memory_per_block_optin": self.shared_block,
            "registers_per_core_limit": 1 << 16,
            "registers_per_block_limit": 1 << 16,
            "device_address_bits": 64,
            "pcie_bandwidth": 32 * GIB,
        }
        for axis, blocks, threads in (("x", 2**31 - 1, 1024), ("y", 2**16 - 1, 1024), ("z", 2**16 - 1, 64)):
            device[f"block_dim_limit_{axis}"] = blocks
            device[f"thread_dim_limit_{axis}"] = threads
        for what, version in (
            ("driver", CUDA),
            ("runtime", CUDA),
            ("compile_time_toolkit", CUDA),
            ("dnn", CUDNN),
        ):
            device[f"{what}_version"] = '"{}.{}.{}"'.format(*version)
        major, minor = self.capability
        feature = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        lines = [f"  {key}: {value}" for key, value in device.items()]
        lines.append(
            f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}"
        )
        versions = [
            f"{key} {{ major: {v[0]} minor: {v[1]} patch: {v[2]} }}"
            for key, v in (("dnn_version_info", CUDNN), ("runtime_version", CUDA))
        ]
        return "\n".join(
            [
                "gpu_device_info {",
                *lines,
                "}",
                'platform_name: "CUDA"',
                *versions,
                f'device_description_str: "{self.name}"',
            ]
        )


TARGETS = {
    "a100": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 85_100_068_864, 2.039e12, 40 * MIB, 1.41,
                   164 * KIB, 163 * KIB, lanes=64),
    "l4": Target("NVIDIA L4", (8, 9), 58, 24_152_899_584, 3.0e11, 48 * MIB, 2.04,
                 100 * KIB, 99 * KIB, threads_core=1536),
    "rtx4090": Target("NVIDIA GeForce RTX 4090", (8, 9), 128, 25_386_352_640, 1.008e12, 72 * MIB, 2.52,
                      100 * KIB, 99 * KIB, threads_core=1536),
    "h200": Target("NVIDIA H200", (9, 0), 132, 151_397_597_184, 4.8e12, 50 * MIB, 1.98,
                   228 * KIB, 227 * KIB, accelerated=True),
    "b200": Target("NVIDIA B200", (10, 0), 148, 193_273_528_320, 8.0e12, 126 * MIB, 1.965,
                   228 * KIB, 227 * KIB, accelerated=True),
    "rtxpro": Target("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 101_973_491_712, 1.792e12, 128 * MIB,
                     2.6, 100 * KIB, 99 * KIB, threads_core=1536),
}  # fmt: skip
