"""Attention within packed segments for Hopper, in NVIDIA's CuTe DSL, which comes with flash attention 4.

As in FlashAttention-3 (Shah et al., arXiv 2407.08608), one warp announces tiles of queries and loads blocks of keys and
values, and groups of four warps, with 64 queries each, take turns with the matrix units: a group computes the scores of
one block and adds the values of the block before, while the others compute exponentials. Three things differ:

- **The first block's largest score stands in for the row's.** Softmax does not depend on what is subtracted from the
  scores; its exponentials must only stay in range. So later blocks are neither searched for their maximum nor rescaled.
  A tile with a row whose sum is out of range is computed again, with a running maximum. FlashDecoding++ (Hong et al.,
  arXiv 2311.01282) does the same with one constant for all rows.
- **Rows lie in shared memory in lines of 64 columns**, with the widest swizzle, though products read at most 8 columns
  beyond a head. Stored densely, rows of 72 or 80 columns are loaded in five pieces of 32 bytes.
- **Values behind a segment are cleared**, so NaN and infinity stay in their segment.

`docs/performance/tower.md` has what was measured.
"""

from functools import partial
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator, hopper_helpers

from vitwire_server.runtime.kernels.hopper_softmax import mask, rescale, round_off, weigh_scores
from vitwire_server.runtime.kernels.operands import GROUP_ROWS

_GROUP, _WARPS, _WARP = 128, 4, 32
"""Threads and warps of a group, threads of a warp."""
_CHUNK = 64
"""Columns of the widest swizzle: 128 bytes."""
_DEPTH = 16
"""Columns of a product's step."""
_REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 24)}
"""Registers of a thread that computes and of one that loads, by the number of groups."""
_STAGES = 2
MOST_TURNS = 64
"""Tiles that a program computes at most."""
_FIELDS = 5
"""Numbers of a tile in shared memory: its head, first row, end, number of keys, and turn."""
_TURNS, _VERDICT, _CLEARED = 1, 8, 9
"""Numbers of named barriers: the first group's turn with the matrix units, the point at which all learn what to compute
again, and values that were cleared."""
_LOG2_E = 1.4426950408889634
_LARGEST_SUM = 2.0**64
"""Largest sum of exponentials; weighted by large values, they must not overflow either."""


class Attention:
    """The kernel for heads of one size; `groups` of warps compute a tile of queries."""

    def __init__(self, head_dim: int, groups: int, *, dependent: bool) -> None:
        self.columns, self.groups, self.dependent = head_dim, groups, dependent
        self.stored = -(-head_dim // _CHUNK) * _CHUNK
        """Columns in shared memory; those behind the head are zeros."""
        self.steps = -(-head_dim // _DEPTH)
        self.rows = groups * GROUP_ROWS
        self.keys = 96 if (head_dim, groups) == (96, 3) else 112  # as registers allow
        self.members = groups * _GROUP + _WARP
        """Threads of the barrier `_VERDICT`."""

    @cute.jit
    def __call__(self, q, k, v, out, tiles, scale: Float32, programs: Int32, together: Int32, stream) -> None:
        """Launch `programs` on `q, k, v, out (rows, heads, columns)` and `tiles (count, 4)`.

        `together` is the number of tiles that follow one another for each head.
        """
        q, k, v, out = [cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1])) for x in (q, k, v, out)]
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, _CHUNK)
        swizzled = warpgroup.make_smem_layout_atom(kind, BFloat16)
        queries = cute.tile_to_shape(swizzled, (self.rows, self.stored), (0, 1))
        blocks = cute.tile_to_shape(swizzled, (self.keys, self.stored, _STAGES), (0, 1, 2))
        load, block = cpasync.CopyBulkTensorTileG2SOp(), cute.select(blocks, mode=[0, 1])
        copy_q, q = cpasync.make_tiled_tma_atom(load, q, queries, (self.rows, self.stored))
        copy_k, k = cpasync.make_tiled_tma_atom(load, k, block, (self.keys, self.stored))
        copy_v, v = cpasync.make_tiled_tma_atom(load, v, block, (self.keys, self.stored))
        products = [self._product(*each) for each in ((self.keys, False), (self.columns, True), (self.stored, True))]
        self.kernel(
            copy_q, copy_k, copy_v, q, k, v, out, tiles, scale * _LOG2_E, together, queries, blocks, *products,
            self._shared(queries, blocks),
        ).launch(
            grid=(programs, 1, 1),
            block=(_GROUP * (self.groups + 1), 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.dependent,
        )  # fmt: skip

    def _product(self, columns: int, of_values: bool) -> cute.TiledMma:
        """A product of 64 rows for each group and `columns`: of queries and keys, or of weights and values."""
        major = OperandMajorMode.MN if of_values else OperandMajorMode.K
        return hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, major, Float32,
            atom_layout_mnk=(self.groups, 1, 1),
            tiler_mn=(GROUP_ROWS, columns),
            a_source=warpgroup.OperandSource.RMEM if of_values else warpgroup.OperandSource.SMEM,
        )  # fmt: skip

    def _shared(self, queries, blocks) -> type:
        """The layout of shared memory: a block is full once it was loaded, empty once all groups are done with it.

        `tile` has two tiles by turns, and `again` whether each of the program's is computed again, and whether any is.
        """
        barriers: Any = cute.struct.MemRange[Int64, _STAGES]

        @cute.struct
        class Shared:
            full_q: cute.struct.MemRange[Int64, 1]
            empty_q: cute.struct.MemRange[Int64, 1]
            full_k: barriers
            empty_k: barriers
            full_v: barriers
            empty_v: barriers
            tile: cute.struct.MemRange[Int32, 2 * _FIELDS]
            again: cute.struct.MemRange[Int32, MOST_TURNS + 1]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(queries)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(blocks)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(blocks)], 1024]

        return Shared

    def _barriers(self, storage):
        """The first stage's barriers: keys are full and empty, then values are."""
        names = ("full_k", "empty_k", "full_v", "empty_v")
        return [getattr(storage, name).data_ptr() for name in names]

    @cute.kernel
    def kernel(
        self,
        copy_q,
        copy_k,
        copy_v,
        q,
        k,
        v,
        out,
        tiles,
        scale,
        together,
        queries,
        blocks,
        scoring,
        adding,
        stored,
        shared: cutlass.Constexpr,
    ) -> None:
        """Tiles of heads, in turns. The first warp loads, and the groups behind the first four warps compute."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        storage = SmemAllocator().allocate(shared)
        tile = cute.make_tensor(storage.tile.data_ptr(), cute.make_layout((_FIELDS, 2)))
        again = cute.make_tensor(storage.again.data_ptr(), cute.make_layout(MOST_TURNS + 1))
        in_q = storage.q.get_tensor(queries.outer, swizzle=queries.inner)
        in_k = storage.k.get_tensor(blocks.outer, swizzle=blocks.inner)
        in_v = storage.v.get_tensor(blocks.outer, swizzle=blocks.inner)
        if warp == 0:
            for copy in (copy_q, copy_k, copy_v):
                cpasync.prefetch_descriptor(copy)
            for half in cutlass.range_constexpr(MOST_TURNS // _WARP):
                again[cute.arch.lane_idx() + half * _WARP] = 0
            with cute.arch.elect_one():
                again[MOST_TURNS] = 0
                cute.arch.mbarrier_init(storage.full_q.data_ptr(), 1)
                cute.arch.mbarrier_init(storage.empty_q.data_ptr(), self.groups * _WARPS)
                for stage in cutlass.range_constexpr(_STAGES):
                    full_k, empty_k, full_v, empty_v = self._barriers(storage)
                    cute.arch.mbarrier_init(full_k + stage, 1)
                    cute.arch.mbarrier_init(full_v + stage, 1)
                    cute.arch.mbarrier_init(empty_k + stage, self.groups * _WARPS)
                    cute.arch.mbarrier_init(empty_v + stage, self.groups * _WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_wait()
        places = in_q, in_k, in_v
        waits = storage.full_q.data_ptr(), storage.empty_q.data_ptr(), *self._barriers(storage)
        if warp < _WARPS:
            cute.arch.setmaxregister_decrease(_REGISTERS[self.groups][1])
            if warp == 0:
                self._load((copy_q, copy_k, copy_v), (q, k, v), tiles, together, places, waits, tile, again)
        else:
            cute.arch.setmaxregister_increase(_REGISTERS[self.groups][0])
            words = cute.recast_ptr(storage.v.data_ptr(), dtype=Int32)
            shape = (self.keys * _CHUNK // 2, self.stored // _CHUNK, _STAGES)
            lines = cute.make_tensor(words, cute.make_layout(shape))
            products = scoring, adding, stored
            self._compute(thread - _GROUP, products, places, lines, out, scale, waits, tile, again)

    @cute.jit
    def _load(self, copies, sources, tiles, together, places, waits, tile, again):
        """The program's tiles, and what they need in the order in which it is used; then those to be computed again."""
        (copy_q, copy_k, copy_v), (q, k, v), (in_q, in_k, in_v) = copies, sources, places
        full_q, empty_q, *of_blocks = waits
        heads = cute.size(q, mode=[2])
        programs, _, _ = cute.arch.grid_dim()
        turn, done = Int32(0), Int32(0)
        for repeated in cutlass.range_constexpr(2):
            number, _, _ = cute.arch.block_idx()
            place = Int32(0)
            if not repeated or again[MOST_TURNS] != 0:
                while number < cute.size(tiles, mode=[0]) * heads:
                    head, first, end, key, length = self._tile(number, tiles, heads, together)
                    if first < end and (not repeated or again[place] != 0):
                        count = (length + self.keys - 1) // self.keys
                        of_k = copy_k, *self._parts(copy_k, k, key, head, in_k), *of_blocks[:2]
                        of_v = copy_v, *self._parts(copy_v, v, key, head, in_v), *of_blocks[2:]
                        self._fetch(*of_k, Int32(0), count, done)
                        self._announce(tile, turn, empty_q, (head, first, end, length, place))
                        self._load_queries(copy_q, q, first, head, in_q, full_q)
                        for each in cutlass.range(1, count, unroll=1):
                            self._fetch(*of_k, each, count, done)
                            self._fetch(*of_v, each - 1, count, done)
                        self._fetch(*of_v, count - 1, count, done)
                        turn += 1
                        done += count
                    number += programs
                    place += 1
                self._announce(tile, turn, empty_q, [Int32(0)] * _FIELDS)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full_q)
                turn += 1
            if cutlass.const_expr(not repeated):
                cute.arch.barrier(barrier_id=_VERDICT, number_of_threads=self.members)

    @cute.jit
    def _announce(self, tile, turn, empty, fields):
        """Write down a tile for the groups once they are done with the one before; the last one has no keys."""
        cute.arch.mbarrier_wait(empty, turn % 2 ^ 1)
        with cute.arch.elect_one():
            for field, value in enumerate(fields):
                tile[field, turn % 2] = value
        cute.arch.sync_warp()

    @cute.jit
    def _compute(self, thread, products, places, lines, out, scale, waits, tile, again):
        """A group's rows of the announced tiles; then of those to be computed again."""
        (in_q, in_k, in_v), (scoring, adding, stored) = places, products
        full_q, empty_q, *_ = waits
        group = cute.arch.make_warp_uniform(thread // _GROUP)
        leader = cute.make_layout(self.groups, stride=_GROUP)(group)
        score, add = scoring.get_slice(leader), stored.get_slice(leader)
        by_column = cute.make_tensor(in_v.iterator, cute.select(in_v.layout, mode=[1, 0, 2]))
        operands = (
            score.make_fragment_A(score.partition_A(in_q)),
            score.make_fragment_B(score.partition_B(in_k)),
            add.make_fragment_B(add.partition_B(by_column)),  # a product of fewer columns begins at the same addresses
        )
        if group == 0 and self.groups > 1:
            cute.arch.barrier_arrive(barrier_id=_TURNS, number_of_threads=2 * _GROUP)
        row = group * GROUP_ROWS + thread % _GROUP // _WARP * 16 + thread % _WARP // 4
        turn, done = Int32(0), Int32(0)
        for repeated in cutlass.range_constexpr(2):
            if not repeated or again[MOST_TURNS] != 0:
                cute.arch.mbarrier_wait(full_q, turn % 2)
                length = tile[3, turn % 2]
                while length > 0:
                    head, first, end, place = [tile[field, turn % 2] for field in (0, 1, 2, 4)]
                    count, left = (length + self.keys - 1) // self.keys, end - first - row
                    given = (thread, group), products, operands, lines, length, count, scale, waits
                    result, total = self._attend(*given, done, repeated)
                    for own in cutlass.range_constexpr(2):
                        if own * 8 < left and not total[own] < _LARGEST_SUM:
                            again[place] = again[MOST_TURNS] = 1
                    to = cute.domain_offset((first, 0), out[None, None, head])
                    self._store(thread, adding, result, total, to, left)
                    turn += 1
                    done += count
                    cute.arch.mbarrier_wait(full_q, turn % 2)
                    length = tile[3, turn % 2]
                self._release(empty_q)
                turn += 1
            if cutlass.const_expr(not repeated):
                if cutlass.const_expr(self.dependent):
                    cute.arch.griddepcontrol_launch_dependents()
                cute.arch.barrier(barrier_id=_VERDICT, number_of_threads=self.members)

    @cute.jit
    def _tile(self, number, tiles, heads, together):
        """A turn's tile: its head, first row, the end of its segment, the first key, and the number of keys."""
        some = together * heads
        before, number = number // some * together, number % some
        together = cutlass.min(cute.size(tiles, mode=[0]) - before, together)
        tile = before + number % together
        first, end, key, length = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3] - tiles[tile, 2]
        return number // together, first, end, key, length

    @cute.jit
    def _load_queries(self, copy, q, first, head, place, full):
        rows = cute.domain_offset((first, 0), q[None, None, head])
        tile = cute.group_modes(cute.local_tile(rows, (self.rows, self.stored), (0, 0)), 0, 2)
        here, there = cpasync.tma_partition(copy, 0, cute.make_layout(1), cute.group_modes(place, 0, 2), tile)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, cute.size_in_bytes(BFloat16, place.layout))
        cute.copy(copy, there, here, tma_bar_ptr=full)

    def _parts(self, copy, source, key, head, shared):
        """Where blocks of a segment are loaded to and from."""
        rows = cute.domain_offset((key, 0), source[None, None, head])
        tiles = cute.group_modes(cute.local_tile(rows, (self.keys, self.stored), (None, 0)), 0, 2)
        return cpasync.tma_partition(copy, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), tiles)

    @cute.jit
    def _fetch(self, copy, place, source, full, empty, each, count, done):
        """One block: the first, then from the last, which may be a part of one, down to the second."""
        stage, phase = (done + each) % _STAGES, (done + each) // _STAGES % 2
        block = Int32(0)
        if each > 0:
            block = count - each
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.keys * self.stored * BFloat16.width // 8)
        cute.copy(copy, source[None, block], place[None, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def _attend(self, own, products, operands, lines, length, count, scale, waits, done, running: cutlass.Constexpr):
        """A group's rows of a tile, and the sums to divide them by; with a running maximum, or the first block's."""
        (thread, group), (scoring, adding, _), (q, k, v) = own, products, operands
        _, empty_q, full_k, empty_k, full_v, empty_v = waits
        whole = adding.get_slice(0)
        result = cute.make_rmem_tensor(whole.partition_shape_C((self.rows, self.columns)), Float32)
        weights = whole.make_fragment_A(whole.partition_shape_A((self.rows, self.keys)))
        shift, total, factor = [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
        weigh = partial(weigh_scores, shift=shift, total=total, factor=factor, scale=scale, running=running)
        score = partial(self._score, scoring, q, k, full_k)
        add = partial(self._add, adding, result, weights, v, full_v)

        scores = score(done)
        warpgroup.wait_group(0)
        self._release(empty_k, done)
        mask(thread, scores, length)
        self._clear(thread, lines, full_v, done, length)
        weigh(scores, opening=True)
        round_off(scores, weights)
        result.fill(0.0)
        for kind in cutlass.range_constexpr(2):  # the last block, then those between
            for each in cutlass.range(1 + kind, count if kind else cutlass.min(count, 2), unroll=1):
                at = done + each
                scores = score(at, turn=group)
                add(at - 1)
                self._pass_turn(group)
                warpgroup.wait_group(1)
                self._release(empty_k, at)
                if cutlass.const_expr(kind == 0):
                    left = length - (count - 1) * self.keys
                    mask(thread, scores, left)
                    self._clear(thread, lines, full_v, at, left)
                weigh(scores, opening=False)
                warpgroup.wait_group(0)
                self._release(empty_v, at - 1)
                if cutlass.const_expr(running):
                    rescale(result, factor)
                round_off(scores, weights)
        self._release(empty_q)
        add(done + count - 1)
        warpgroup.wait_group(0)
        self._release(empty_v, done + count - 1)
        for row in cutlass.range_constexpr(2):
            total[row] += cute.arch.shuffle_sync_bfly(total[row], offset=1)
            total[row] += cute.arch.shuffle_sync_bfly(total[row], offset=2)
        return result, total

    def _score(self, product, q, k, full, at, turn=None):
        """Start the product of queries with block `at`; with a `turn`, once the group has it."""
        stage, phase = at % _STAGES, at // _STAGES % 2
        scores = cute.make_rmem_tensor(product.get_slice(0).partition_shape_C((self.rows, self.keys)), Float32)
        cute.arch.mbarrier_wait(full + stage, phase)
        if self.groups > 1 and turn is not None:
            cute.arch.barrier(barrier_id=_TURNS + turn, number_of_threads=2 * _GROUP)
        warpgroup.fence()
        atom = cute.make_mma_atom(product.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for step in range(self.steps):
            cute.gemm(atom, scores, q[None, None, step], k[None, None, step, stage], scores)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        return scores

    def _add(self, product, result, weights, v, full, at):
        """Start to add the values of block `at`."""
        stage, phase = at % _STAGES, at // _STAGES % 2
        cute.arch.mbarrier_wait(full + stage, phase)
        warpgroup.fence()
        atom = cute.make_mma_atom(product.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for step in range(self.keys // _DEPTH):
            cute.gemm(atom, result, weights[None, None, step], v[None, None, step, stage], result)
        warpgroup.commit_group()

    def _pass_turn(self, group):
        if self.groups > 1:
            following = _TURNS + (group + 1) % self.groups
            cute.arch.barrier_arrive(barrier_id=following, number_of_threads=2 * _GROUP)

    def _release(self, empty, at=0):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + at % _STAGES)

    @cute.jit
    def _clear(self, thread, lines, full, at, left):
        """Values behind the segment become zeros, as NaN and infinity times a weight of zero are NaN.

        All groups take part. A row's columns are in any order within a line of 128 bytes of each chunk.
        """
        if left < self.keys:
            stage, phase = at % _STAGES, at // _STAGES % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            for chunk in cutlass.range_constexpr(self.stored // _CHUNK):
                for each in cutlass.range(
                    left * _CHUNK // 2 + thread, self.keys * _CHUNK // 2, self.groups * _GROUP, unroll=1
                ):
                    lines[each, chunk, stage] = 0
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=_CLEARED, number_of_threads=self.groups * _GROUP)

    @cute.jit
    def _store(self, thread, product, result, total, place, left):
        """Divide by the sums, and store the thread's two rows, eight apart, which are among the tile's next `left`."""
        for row in cutlass.range_constexpr(2):
            total[row] = cute.arch.rcp_approx(total[row])
        rescale(result, total)
        rounded = cute.make_rmem_tensor(result.shape, BFloat16)
        round_off(result, rounded)
        to = product.get_slice(thread).partition_C(cute.local_tile(place, (self.rows, self.columns), (0, 0)))
        for own in cutlass.range_constexpr(2):
            if own * 8 < left:
                for each in cutlass.range_constexpr(self.columns // 8):
                    cute.autovec_copy(rounded[(None, own, each), 0, 0], to[(None, own, each), 0, 0])
