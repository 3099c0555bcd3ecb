"""Constrained decoding: which tokens may follow, so that the text matches a regex, a JSON schema or a grammar.

Needs no JAX. ``ConstraintCompiler`` is the entry; ``pip install "jaxsched[structured]"`` brings what it loads.
"""

from .automaton import TokenAutomaton
from .compiler import Constraint, ConstraintCompiler
from .matcher import AutomatonMatcher, GrammarMatcher, Matcher

__all__ = [
    "AutomatonMatcher",
    "Constraint",
    "ConstraintCompiler",
    "GrammarMatcher",
    "Matcher",
    "TokenAutomaton",
]
