"""The modules behind scripts/aot_check: what a machine without a GPU can prove about the kernels and programs.

``targets`` describes GPUs, ``jobs`` says what is compiled for them, ``worker`` compiles it in processes of their own,
``assembly`` reads what the assembler and the compiler's plan say, ``hlo`` reads the optimised program, ``traffic``
counts its bytes, ``check`` runs all, judges and prints. Only ``worker`` and what it calls import jax.
"""
