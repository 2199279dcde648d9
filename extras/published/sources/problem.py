"""Modules of published benchmarks, read from their source: parsed and interpreted, never executed.

A problem is Python text with a class ``Model`` and the functions ``get_inputs`` and
``get_init_inputs``, as KernelBench has them. Of Python it may use assignments, expressions and
returns; of torch what problem.yaml lists. Everything else is refused with its name.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from itercast.capture.base.yaml_text import facts_of
from itercast.microbench.store import Facts, Row

LISTED = facts_of(__file__)
METHODS, ATTRIBUTES = LISTED["methods"], LISTED["attributes"]
OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.MatMult: operator.matmul,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
MOST_NUMBER = 2**53  # of plain numbers; powers of larger ones may take forever
NAMESPACES: Mapping[str, Facts] = {
    "torch": {name: getattr(torch, name) for name in LISTED["torch"]} | {"rand_mix": torch.randn},
    "nn": {name: getattr(nn, name) for name in LISTED["nn"]},
    "F": {name: getattr(functional, name) for name in LISTED["functional"]},
    "math": {"sqrt": math.sqrt, "pi": math.pi},
}
LONGER = {"torch.nn": "nn", "torch.nn.functional": "F", "nn.functional": "F"}
Scope = Row


class Problem(nn.Module):
    """The class ``Model`` of a problem; its forward is interpreted, in training mode throughout."""

    def __init__(self, methods: Mapping[str, ast.FunctionDef], scope: Scope, given: Any) -> None:
        super().__init__()
        self.methods, self.scope = methods, scope
        if "__init__" in methods:
            _call(methods["__init__"], scope, self, given)

    def train(self, mode: bool = True) -> Problem:
        """Ignore ``mode``: problems are timed in training mode, without eval()."""
        super().train(True)
        return self

    def forward(self, *inputs: Any) -> Any:
        """The value that the problem's forward returns."""
        return _call(self.methods["forward"], self.scope, self, inputs)


def problem(source: str) -> tuple[Problem, tuple[Any, ...]]:
    """The module and the inputs of a problem's text; ValueError names what is not allowed."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ValueError(f"problem is not Python: {type(exc).__name__}") from None
    scope: Scope = {}
    functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
    classes = {n.name: n for n in body if isinstance(n, ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.Assign):
            _assign(node, scope)
    methods = {
        n.name: n
        for n in (classes["Model"].body if "Model" in classes else ())
        if isinstance(n, ast.FunctionDef)
    }
    if "forward" not in methods or "get_inputs" not in functions:
        raise ValueError("problem has no Model with forward, or no get_inputs")
    given: Any = ()
    if "get_init_inputs" in functions:
        given = _call(functions["get_init_inputs"], scope, None, ())
    module = Problem(methods, scope, given)
    return module, tuple(_call(functions["get_inputs"], scope, None, ()))


def _call(node: ast.FunctionDef, outer: Scope, owner: Any, given: Sequence[Any]) -> Any:
    """Interpret a function with positional arguments; a method gets ``self`` before them."""
    names = [a.arg for a in node.args.args]
    scope = dict(outer)
    values = list(given)
    if owner is not None:
        values.insert(0, owner)
    defaults = node.args.defaults
    for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        scope[name] = _value(default, outer)
    if len(values) > len(names):
        raise ValueError(f"{node.name} takes {len(names)} values, got {len(values)}")
    scope.update(zip(names, values, strict=False))
    for line in node.body:
        if isinstance(line, ast.Return):
            return None if line.value is None else _value(line.value, scope)
        if isinstance(line, ast.Assign):
            _assign(line, scope)
        elif not (isinstance(line, ast.Expr) and _is_idle(line.value)):
            raise ValueError(f"problem uses {type(line).__name__}, which is not allowed")
    return None


def _is_idle(node: ast.expr) -> bool:
    """Whether a statement is a docstring, or the call of the base class."""
    return isinstance(node, ast.Constant) or ast.unparse(node).startswith("super(")


def _assign(node: ast.Assign, scope: Scope) -> None:
    """Bind a name, or an attribute of the module."""
    value = _value(node.value, scope)
    for target in node.targets:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Attribute) and _is_own(target.value, scope):
            _check_attribute(target.attr)
            setattr(scope["self"], target.attr, value)
        else:
            raise ValueError(f"problem assigns to {ast.unparse(target)[:40]!r}: not allowed")


def _is_own(node: ast.expr, scope: Scope) -> bool:
    own = isinstance(node, ast.Name) and node.id == "self"
    return own and isinstance(scope.get("self"), Problem)


def _check_attribute(name: str) -> None:
    if name.startswith("_") or hasattr(Problem, name) or name in ("methods", "scope"):
        raise ValueError(f"problem uses the attribute {name!r}, which is not allowed")


def _value(node: ast.expr, scope: Scope) -> Any:
    """The value of an expression."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in scope:
        return scope[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return (list if isinstance(node, ast.List) else tuple)(_items(node.elts, scope))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand, scope))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _operation(node, scope)
    if isinstance(node, ast.Attribute):
        return _attribute(node, scope)
    if isinstance(node, ast.Subscript):
        return _value(node.value, scope)[_value(node.slice, scope)]
    if isinstance(node, ast.Slice):
        bounds = (node.lower, node.upper, node.step)
        return slice(*(None if b is None else _value(b, scope) for b in bounds))
    if isinstance(node, ast.Call):
        named = {k.arg: _value(k.value, scope) for k in node.keywords if k.arg}
        named.pop("device", None)  # captured without one
        return _value(node.func, scope)(*_items(node.args, scope), **named)
    raise ValueError(f"problem uses {ast.unparse(node)[:60]!r}, which is not allowed")


def _items(nodes: Sequence[ast.expr], scope: Scope) -> list[Any]:
    found: list[Any] = []
    for node in nodes:
        if isinstance(node, ast.Starred):
            found += _value(node.value, scope)
        else:
            found.append(_value(node, scope))
    return found


def _operation(node: ast.BinOp, scope: Scope) -> Any:
    left, right = _value(node.left, scope), _value(node.right, scope)
    tensors = isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor)
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if not tensors and not (numbers and max(abs(left), abs(right)) < MOST_NUMBER):
        raise ValueError(f"problem computes {ast.unparse(node)[:60]!r}, which is not allowed")
    if numbers and isinstance(node.op, ast.Pow) and abs(right) > math.log2(MOST_NUMBER):
        raise ValueError(f"problem computes {ast.unparse(node)[:60]!r}, which is not allowed")
    return OPERATORS[type(node.op)](left, right)


def _attribute(node: ast.Attribute, scope: Scope) -> Any:
    """A listed name of torch, an attribute that the module was given, a listed one of a tensor."""
    path = ast.unparse(node.value)
    if path not in scope and (known := NAMESPACES.get(LONGER.get(path, path))) is not None:
        if node.attr in known or f"{path}.{node.attr}" in LONGER:
            return known.get(node.attr)
        raise ValueError(f"problem uses {path}.{node.attr}, which is not allowed")
    if _is_own(node.value, scope):
        _check_attribute(node.attr)
        return getattr(scope["self"], node.attr)
    owner = _value(node.value, scope)
    if isinstance(owner, torch.Tensor) and node.attr in ATTRIBUTES:
        return getattr(owner, node.attr)
    if isinstance(owner, torch.Tensor) and node.attr in METHODS:
        return partial(getattr(owner, node.attr))
    raise ValueError(f"problem uses the attribute {node.attr!r}, which is not allowed")
