"""Beam search over steps (2408.03314) and diverse verifier tree search (Beeching et al. 2024).

Beam search keeps the `beams` best partial answers and samples n / beams next steps of each. A finished answer that ranks among the best keeps
its place: it stays a candidate, and one beam fewer is open from then on. Paths with equal text count once. If there are fewer distinct paths
than places, they share the children of all places. DVTS runs `subtrees` beam searches with one place each, which do not see one another.
"""

from __future__ import annotations

from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import BeamSearch, Dvts
from burnish.evaluation.strategies.step_tree import COPY, StepTree, by_score, repeated


async def beam_search(search: Search, options: BeamSearch) -> Choice:
    """Search with one beam of `beams` places."""
    tree = StepTree(search, options)
    return await tree.choose(options.choose, await grow_beam(tree, options.beams, options.n // options.beams))


async def dvts(search: Search, options: Dvts) -> Choice:
    """Search with independent beams of one place, which advance together."""
    trees = [StepTree(search, options) for _ in range(options.subtrees)]
    ends = await search.gather(*(grow_beam(tree, 1, options.n // options.subtrees) for tree in trees))
    whole = StepTree(search, options)
    whole.answers = [answer for tree in trees for answer in tree.answers]
    whole.num_steps = max(tree.num_steps for tree in trees)
    return await whole.choose(options.choose, by_score([path for paths in ends for path in paths]))


async def grow_beam(tree: StepTree, width: int, num_children: int) -> list[SearchNode]:
    """Grow a beam until all its places are finished or the budget ends it. Return the paths that are open then, the best first."""
    beam = [tree.search.root]
    while beam and tree.may_branch:
        base, more = divmod(width * num_children, len(beam))
        ranked = await tree.score(await tree.expand(repeated(beam, [base + (k < more) for k in range(len(beam))])))
        if not ranked:
            break  # the budget is spent
        best = [path for path in ranked if COPY not in path.notes][:width]
        beam = [path for path in best if path.is_open]
        width -= len(best) - len(beam)
    return beam
