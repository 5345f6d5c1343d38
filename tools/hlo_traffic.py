"""What each instruction of a compiled program computes, moves in memory and sends, read off the program's text.

The least time of a program is the sum over its instructions of the longer of two times: the FLOPs of its products over
the card's rate, and the bytes that it reads and writes over the memory's rate (the roofline: Williams et al., CACM
52(4), 2009). Launches, caches, and kernels that do not reach these rates are not accounted for.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8} | {
    f"{s}{n}": n // 8 for s in "su" for n in (8, 16, 32, 64)
}
_ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
_CUBLAS = 'custom_call_target="__cublas'
_SENT = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Instruction:
    """A line of a computation. argument: the text of its operands; attributes: the text after them."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    argument: str
    attributes: str
    is_root: bool


class Cost(NamedTuple):
    """The cost of one execution of an instruction, which a run of the program executes `times` times."""

    instruction: Instruction
    times: int
    flops: float
    num_bytes: int
    sent_bytes: int

    @property
    def source(self) -> str:
        """Where in the traced function the instruction comes from, as jax names it."""
        found = re.search(r'op_name="([^"]*)"', self.instruction.attributes)
        return found[1] if found else ""


def arrays(type: str) -> list[str]:
    """The type of an array without its layout; for a tuple, that of each of its arrays."""
    return [f"{dtype}[{dims}]" for dtype, dims in _ARRAY.findall(type)]


def size_bytes(type: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(BYTES[dtype] * math.prod(_dims(dims)) for dtype, dims in _ARRAY.findall(type))


def costs(program: str) -> list[Cost]:
    """The cost of each instruction that computes, moves or sends something.

    A loop's instructions count once per round. Of a conditional's branches only the one for true counts, which
    jax.lax.cond puts last. Raises ValueError for a loop whose number of rounds nothing tells.
    """
    computations, entry = _parsed(program)
    return list(_walk(computations, entry, 1))


def _parsed(program: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    computations, current, entry = {}, {}, ""
    for line in re.sub(r"/\*index=\d+\*/", "", program).splitlines():
        if head := _COMPUTATION.match(line.rstrip()):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            root, name, type, opcode, rest = found.groups()
            depth, end = 1, 0
            while depth:
                depth += {"(": 1, ")": -1}.get(rest[end], 0)
                end += 1
            argument = rest[: end - 1]
            operands = re.findall(r"%([\w.\-]+)", argument)
            current[name] = Instruction(name, type, opcode, operands, argument, rest[end:], bool(root))
    return computations, entry


def _walk(computations: dict, name: str, times: int) -> Iterator[Cost]:
    here = computations[name]
    for instruction in here.values():
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode in _FREE or opcode.endswith("-done"):
            continue
        if opcode == "while":
            yield from _walk(computations, _called("body", attributes), times * _rounds(instruction, computations))
        elif opcode == "conditional":
            branches = re.search(r"branch_computations=\{[^}]*%([\w.\-]+)\}", attributes)
            yield from _walk(computations, branches[1] if branches else _called("true_computation", attributes), times)
        elif opcode in ("call", "async-start"):
            yield from _walk(computations, _called("calls|to_apply", attributes), times)
        elif opcode.removesuffix("-start") in _SENT:
            yield Cost(instruction, times, 0, 0, _sent(instruction, here))
        else:
            flops, num_bytes = _flops(instruction, here, computations), _moved(instruction, here, computations)
            yield Cost(instruction, times, flops, num_bytes, 0)


def _rounds(loop: Instruction, computations: dict) -> int:
    """The number of rounds of a loop: the compiler's own word for it, or else where its condition ends it.

    A loop of jax counts from 0 in steps of 1.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition = computations[_called("condition", loop.attributes)].values()
    ends = [one.argument for one in condition if one.opcode == "constant" and one.type.startswith("s32[]")]
    if len(ends) != 1 or not any("direction=LT" in one.attributes for one in condition):
        raise ValueError(f"{loop.name}: a loop of an unknown number of rounds")
    return int(ends[0])


def _called(attribute: str, attributes: str) -> str:
    return re.search(rf"\b(?:{attribute})=%?([\w.\-]+)", attributes)[1]


def _flops(instruction: Instruction, here: dict, computations: dict) -> float:
    """FLOPs of products only: 2 x size of the result x size of the contracted axes."""
    if instruction.opcode == "dot":
        left = _dims(_ARRAY.search(here[instruction.operands[0]].type)[2])
        axes = _dims(re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)[1])
        result = _dims(_ARRAY.search(instruction.type)[2])
        return 2.0 * math.prod(result) * math.prod(left[axis] for axis in axes)
    if instruction.opcode == "fusion":
        inner = computations[_called("calls", instruction.attributes)]
        return sum(_flops(one, inner, computations) for one in inner.values())
    if _CUBLAS in instruction.attributes:
        left = _dims(_ARRAY.search(here[instruction.operands[0]].type)[2])
        axes = re.search(r'"lhs_contracting_dimensions":\[([\d,"]*)\]', instruction.attributes)[1]
        result = _dims(_ARRAY.search(instruction.type)[2])
        return 2.0 * math.prod(result) * math.prod(left[axis] for axis in _dims(axes.replace('"', "")))
    if "__cudnn$fmha" in instruction.attributes:  # [B, T, H, K]: two products forward, five backward
        B, T, H, K = _dims(_ARRAY.search(here[instruction.operands[0]].type)[2])
        causal = "NO_MASK" not in instruction.attributes  # half of the scores
        return (5 if "Backward" in instruction.attributes else 2) * 2.0 * B * H * T * T * K / (1 + causal)
    return 0.0


def _moved(instruction: Instruction, here: dict, computations: dict) -> int:
    """Bytes read and written; of a slice only the slice, of an update in place only the update."""
    given = [here[operand].type for operand in instruction.operands]
    if instruction.opcode == "dynamic-slice":
        return 2 * size_bytes(instruction.type)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * size_bytes(given[1])
    if instruction.opcode != "fusion":
        return sum(map(size_bytes, given)) + _result_bytes(instruction)
    inner = computations[_called("calls", instruction.attributes)]
    parameters = sorted((one for one in inner.values() if one.opcode == "parameter"), key=lambda one: int(one.argument))
    read = sum(_read(one, size_bytes(type), inner) for one, type in zip(parameters, given, strict=True))
    root = next(one for one in inner.values() if one.is_root)
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return read + sum(_written(result, inner) for result in results)


def _read(value: Instruction, whole: int, inner: dict) -> int:
    """Bytes that are read of a value; if it is only sliced or gathered from, no more than those parts."""
    total = 0
    for user in inner.values():
        if value.name not in user.operands:
            continue
        first = user.operands[0] == value.name
        if user.opcode == "bitcast":
            total += _read(user, whole, inner)
        elif user.opcode in ("slice", "dynamic-slice") and first:
            total += _read(user, size_bytes(user.type), inner)
        elif user.opcode == "gather" and first:
            total += size_bytes(user.type)
        elif not (user.opcode == "dynamic-update-slice" and first):
            return whole
    return whole if value.is_root else min(whole, total)


def _written(result: Instruction, inner: dict) -> int:
    while result.opcode == "bitcast":
        result = inner[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return size_bytes(inner[result.operands[1]].type)
    return _result_bytes(result)


def _result_bytes(instruction: Instruction) -> int:
    """Of a product of cuBLAS without the memory for its own use, which is its second result."""
    type = instruction.type
    return size_bytes(arrays(type)[0] if _CUBLAS in instruction.attributes else type)


def _sent(instruction: Instruction, here: dict) -> int:
    """Bytes that a device sends in a ring: the larger of input and output, or twice the input for an all-reduce.

    The device's own part, 1/N of them, is not sent but counted as well.
    """
    given = sum(size_bytes(here[operand].type) for operand in instruction.operands)
    kind = instruction.opcode.removesuffix("-start")
    whole = size_bytes(instruction.type)
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        whole -= given  # its type is (input, output)
    return 2 * given if kind == "all-reduce" else max(given, whole)


def _dims(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]
