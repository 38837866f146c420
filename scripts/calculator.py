#!/usr/bin/env python3
"""A calculator for `tools.command`: one JSON object a line with a "call", one reply a line (docs/tools.md).

A call is an expression, as `3 * (4 + 5)`, or the JSON that Qwen's and Hermes' templates ask for:
{"name": "calculator", "arguments": {"expression": "3 * (4 + 5)"}}. Numbers, + - * / and brackets; nothing else is evaluated.
"""

import ast
import json
import operator
import sys

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CHARACTERS_MAX = 200


def value(node):
    """The value of a parsed expression."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("numbers, + - * / and brackets only")


def expression(call):
    """The expression of a call."""
    try:
        asked = json.loads(call)
    except ValueError:
        return call
    if isinstance(asked, dict):
        arguments = asked.get("arguments")
        if asked.get("name") != "calculator" or not isinstance(arguments, dict) or "expression" not in arguments:
            raise ValueError('write {"name": "calculator", "arguments": {"expression": "3 * 4"}}')
        return str(arguments["expression"])
    return call


def reply(call):
    """What the calculator says to a call."""
    try:
        text = expression(call)
        if len(text) > CHARACTERS_MAX:
            raise ValueError(f"more than {CHARACTERS_MAX} characters")
        result = value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return {"error": "error: no expression"}
    except (ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return {"error": f"error: {error}"}
    if isinstance(result, float) and result.is_integer() and abs(result) < 1e15:
        result = int(result)
    return {"reply": str(result)}


for line in sys.stdin:
    print(json.dumps(reply(json.loads(line)["call"])))
