"""Arithmetic on untrusted text, bounded in size: numbers, + - * / // % and parentheses; no names, no powers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_VALUE = 10**15
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> Fraction:
    """The exact value. Raises ValueError that says what is wrong with the expression."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, {MAX_CHARACTERS} are the most")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    if abs(value) > MAX_VALUE:
        raise ValueError(f"the value is beyond {MAX_VALUE}")
    return value


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return Fraction(_BINARY[type(op)](_value(left), _value(right)))
    raise ValueError("an expression has numbers, + - * / // % and parentheses only")


def spelled(value: Fraction) -> str:
    """As people write it: whole where it is whole, else with up to six decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")
