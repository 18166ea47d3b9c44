"""Finds what is wrong with tests of programs from their source: any program passes some, and no program others.

A test shares only plain data with the program (protocol.py). So it proves nothing if the program judges itself: if an
`assert` is decided by a function of the program that gets the program's own answer, as in
`assert isclose(area(2), 12.566)` without an import of `isclose`. And no program can pass a test that needs an operator
on one of the program's objects, passes a function to the program, or looks for a change in place. As tests are not run,
only some faults are found: those that are reported exist, and there may be others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rlft.system.sandbox.protocol import missing_names

PLAIN = (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, range)
PLAIN_ATTRIBUTES = frozenset(name for kind in PLAIN for name in dir(kind))
MEASURES = frozenset(
    {"len", "list", "tuple", "set", "sorted", "sum", "min", "max", "str", "repr", "abs", "bool", "iter"}
)
TRIVIAL = (0, 1, "", None)  # includes True and False, which helpers return if all is well


class Doubt(StrEnum):
    """What may be wrong with tests, in words that follow the number of such tests."""

    nothing = "use no name that a program could define"
    own_judge = "have the program judge its own answer, by a helper that they neither define nor import"
    itself = "compare answers of the program with each other or with its own constants alone"
    operators = "use an operator, len() or a loop on an object of the program, which answers methods only"
    function = "hand the program a function, which cannot cross"
    in_place = "look for a change in place, and the program gets copies"


REFUSED = {
    Doubt.nothing: "call the program there",
    Doubt.own_judge: "import the helper there, as in from math import isclose",
}
"""{doubt that makes a test worthless: what to do}."""


def doubts(source: str) -> set[Doubt]:
    """What may be wrong with a test in Python. SyntaxError if it is not Python.

    >>> [doubt.name for doubt in doubts("assert isclose(area(2), 12.566)")]
    ['own_judge']
    """
    tree = ast.parse(source)
    names = missing_names(source)[1]
    if not names:
        return {Doubt.nothing}
    reader = Reader.of(tree, names)
    result = {doubt for node in ast.walk(tree) for doubt in reader.doubts_at(node)}
    verdicts = list(decisions(tree))
    if verdicts and all(reader.judges_itself(verdict) for verdict in verdicts):
        result.add(Doubt.own_judge)
    return result


def decisions(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions that decide whether a test is passed: its asserts, and conditions under which it raises."""
    for node in ast.walk(tree):
        match node:
            case ast.Assert(test=test):
                yield test
            case ast.If(test=test, body=[ast.Raise(), *_]):
                yield test


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What is known about a test's names.

    Attributes:
        callables: names that belong to the program, and parameters that are called, which may hold such a name.
        functions: names of functions that the test defines.
        answers: {variable that holds an answer of the program: names of the callables from which it comes}.
        objects: variables that hold an object of the program.
    """

    callables: frozenset[str]
    functions: frozenset[str]
    answers: dict[str, frozenset[str]]
    objects: set[str]

    @classmethod
    def of(cls, tree: ast.AST, names: set[str]) -> Reader:
        nodes = list(ast.walk(tree))
        defined = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        parameters = {a.arg for f in defined for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)}
        parameters &= {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        functions = {f.name for f in defined if not isinstance(f, ast.Lambda)}
        reader = cls(callables=frozenset(names | parameters), functions=frozenset(functions), answers={}, objects=set())
        for _ in range(2):  # twice, since a loop may use a variable before the line that sets it
            for node in nodes:
                reader._read(node)
        return reader

    def doubts_at(self, node: ast.AST) -> Iterator[Doubt]:
        match node:
            case ast.Call() if self.callee(node) and any(self._is_function(a) for a in arguments(node)):
                yield Doubt.function
            case ast.Call(func=ast.Name(id=name)) if name in MEASURES and any(map(self._is_object, arguments(node))):
                yield Doubt.operators
            case ast.Compare(left=left, ops=operators, comparators=others):
                sides = [left, *others]
                if any(map(self._is_object, sides)) and not all(isinstance(o, ast.Is | ast.IsNot) for o in operators):
                    yield Doubt.operators
                if all(self.sources(side) for side in sides):
                    yield Doubt.itself
            case ast.Subscript(value=value) | ast.For(iter=value) | ast.comprehension(iter=value):
                if self._is_object(value):
                    yield Doubt.operators
            case ast.Assert(test=value) | ast.UnaryOp(op=ast.Not(), operand=value):
                if self._is_object(value):
                    yield Doubt.operators
            case ast.Expr(value=ast.Call() as call) if self._changes_arguments(call):
                yield Doubt.in_place

    def judges_itself(self, verdict: ast.expr) -> bool:
        """Whether the verdict comes from a program's function that gets the program's own answer.

        It does not if the function's result is compared with something that the program cannot guess.
        """
        if isinstance(verdict, ast.UnaryOp) and isinstance(verdict.op, ast.Not):
            return self.judges_itself(verdict.operand)
        if isinstance(verdict, ast.BoolOp):
            combined = all if isinstance(verdict.op, ast.And) else any
            return combined(self.judges_itself(value) for value in verdict.values)
        if isinstance(verdict, ast.Compare):
            sides = [verdict.left, *verdict.comparators]
            telling = any(isinstance(op, ast.Eq | ast.Is | ast.In) for op in verdict.ops)
            told = [side for side in sides if not (isinstance(side, ast.Constant) and side.value in TRIVIAL)]
            if telling and not all(map(self.sources, told)):
                return False
        return any(self._is_own_judge(node) for node in ast.walk(verdict) if isinstance(node, ast.Call))

    def sources(self, expression: ast.AST) -> frozenset[str]:
        """The program's names on which an expression's value depends; none if the test itself knows the value."""
        names: set[str] = set()
        for node in ast.walk(expression):
            if isinstance(node, ast.Call):
                names |= {name for name in [self.callee(node)] if name}
            elif isinstance(node, ast.Name):
                names |= self.answers.get(node.id, frozenset())
                names |= {node.id} & self.callables
        return frozenset(names)

    def callee(self, call: ast.Call) -> str | None:
        """The name of the called function, class or method if it belongs to the program, else None."""
        match call.func:
            case ast.Name(id=name):
                return name if name in self.callables else None
            case ast.Attribute(value=value, attr=name) if name not in PLAIN_ATTRIBUTES and self.sources(value):
                return name
        return None

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                targets = [target]
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                targets = [target]
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                if name in self.answers and attribute not in PLAIN_ATTRIBUTES:
                    self.objects.add(name)
                return
            case _:
                return
        sources = self.sources(value)
        for name in [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]:
            if sources:
                self.answers[name] = self.answers.get(name, frozenset()) | sources

    def _is_object(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.objects

    def _is_function(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Lambda) or (isinstance(node, ast.Name) and node.id in self.functions)

    def _is_own_judge(self, call: ast.Call) -> bool:
        name = self.callee(call)
        return name is not None and any(self.sources(argument) - {name} for argument in arguments(call))

    def _changes_arguments(self, call: ast.Call) -> bool:
        """Whether a function is called only for what it does to a variable."""
        plain = isinstance(call.func, ast.Name) and self.callee(call) is not None
        variables = [a.id for a in arguments(call) if isinstance(a, ast.Name)]
        return plain and any(name not in self.answers and name not in self.callables for name in variables)


def arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
