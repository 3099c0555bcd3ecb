"""Times the grouped product of routed MLPs against ``jax.lax.ragged_dot``, in milliseconds, side by side.

python scripts/bench_grouped.py [--experts 32] [--per-token 4] [--width 1024] [--rows 1,8,32,160]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.pallas_kernels import grouped_matmul


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", default="1,8,32,160")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    count, width, rng = args.experts, args.width, np.random.default_rng(0)
    kernel = jnp.asarray(rng.standard_normal((count, width, width)), jnp.float32)

    @jax.jit
    def ragged(x: jax.Array, kernel: jax.Array, group: jax.Array) -> jax.Array:
        sizes = jnp.bincount(group, length=count).astype(jnp.int32)
        return jax.lax.ragged_dot(x, kernel, sizes, precision=jax.lax.Precision.HIGHEST)

    ways = {"ragged_dot": ragged, "grouped_matmul": jax.jit(grouped_matmul)}
    print(f"{'rows':>6}" + "".join(f"{name:>16}" for name in ways))
    for rows in map(int, args.rows.split(",")):
        chosen = np.stack([rng.permutation(count)[: args.per_token] for _ in range(rows)])
        group = jnp.asarray(np.sort(chosen.reshape(-1)), jnp.int32)
        x = jnp.asarray(rng.standard_normal((group.size, width)), jnp.float32)
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(args.rounds + 1):  # the first compiles
            for name, way in ways.items():
                begin = time.perf_counter()
                way(x, kernel, group).block_until_ready()
                best[name] = min(best[name], time.perf_counter() - begin)
        print(f"{rows:6}" + "".join(f"{1e3 * seconds:16.2f}" for seconds in best.values()))


if __name__ == "__main__":
    main()
