"""What a thread does with its values of a product in `hopper_kernel`: softmax without a search, and rounding.

A thread has two rows of a group's 64, eight apart, and of each block two columns of eight.
"""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_HEADROOM = 32.0
"""The first block's largest exponential is 2 ** -32, so later ones may be 2 ** 96 times as large."""


@cute.jit
def mask(thread, scores, length) -> None:
    """Keys behind the segment get no weight."""
    by_row, column = _by_row(scores), thread % 4 * 2
    for row in cutlass.range_constexpr(2):
        for each in cutlass.range_constexpr(cute.size(scores) // 2):
            if column + (each // 2 * 8 + each % 2) >= length:
                by_row[row, each] = -Float32.inf


@cute.jit
def weigh_scores(
    scores, shift, total, factor, scale, opening: cutlass.Constexpr[bool], running: cutlass.Constexpr[bool]
) -> None:
    """Exponentials of scores, in place, and their sums; `factor` is for what was added up before."""
    by_row = _by_row(scores)
    for row in cutlass.range_constexpr(2):
        values = by_row[row, None].load()
        if cutlass.const_expr(opening or running):
            top = values.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2)) * scale
            if cutlass.const_expr(opening):
                shift[row] = top + (0.0 if running else _HEADROOM)
                total[row] = 0.0
            else:
                top = cute.arch.fmax(top, shift[row])
                factor[row] = cute.math.exp2(shift[row] - top, fastmath=True)
                total[row] *= factor[row]
                shift[row] = top
        values = cute.math.exp2(values * scale - shift[row], fastmath=True)
        total[row] = values.reduce(cute.ReductionOp.ADD, total[row], 0)
        by_row[row, None].store(values)


@cute.jit
def rescale(result, factor) -> None:
    """Multiply each row by its factor."""
    by_row = _by_row(result)
    for row in cutlass.range_constexpr(2):
        by_row[row, None].store(by_row[row, None].load() * factor[row])


def round_off(values, rounded) -> None:
    """Values in bfloat16. A thread's results of one product are in the order in which the next takes them."""
    source = cute.make_tensor(values.iterator, cute.make_layout(cute.size(values)))
    pairs = cute.recast_tensor(rounded, Int32)
    pairs = cute.make_tensor(pairs.iterator, cute.make_layout(cute.size(pairs)))
    for each in range(cute.size(pairs)):
        pairs[each] = _pair(source[2 * each], source[2 * each + 1])


def _by_row(values):
    """A thread's values of a product, `(2, columns)`: it has two rows."""
    layout = cute.make_layout((2, (2, cute.size(values) // 4)), stride=(2, (1, 4)))
    return cute.make_tensor(values.iterator, layout)


@dsl_user_op
def _pair(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    """Two values as bfloat16 in one register."""
    values = [Float32(value).ir_value(loc=loc, ip=ip) for value in (high, low)]
    convert = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return Int32(
        llvm.inline_asm(
            T.i32(),
            values,
            convert,
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )
