import pytest
import torch
from helpers.tiny import branching_rollouts, rows_of

from grpo_lightning import PrefixTree, Rollouts


def test_a_tree_by_hand():
    rollouts = Rollouts.from_lists(
        prompts=[[1], [2]], group=[0, 0, 1, 0], completions=[[7, 8, 9], [7, 8, 8], [7, 8], [9]]
    )
    tree = PrefixTree.from_rollouts(rollouts)
    a7, a78, a789, b7, b78, b788, c7, c78, d9 = tree.node.tolist()
    # The first two share 7 and 8; the third belongs to another prompt.
    assert (a7, a78) == (b7, b78)
    assert tree.num_nodes == len({a7, a78, a789, b788, c7, c78, d9}) == 7
    # 7 and 9 are tried at the start, 9 and 8 after 7 8.
    parent = tree.parent.tolist()
    assert parent[a7] == parent[d9]
    assert parent[a789] == parent[b788]
    assert len({parent[a7], parent[a78], parent[a789], parent[c7], parent[c78]}) == 5
    assert all(0 <= number < tree.num_parents for number in parent)


@pytest.mark.parametrize("seed", range(10))
def test_nodes_are_distinct_prefixes_and_parents_what_they_continue(seed):
    rollouts = branching_rollouts(seed)
    tree = PrefixTree.from_rollouts(rollouts)
    named: dict[int, tuple] = {}
    before: dict[int, tuple] = {}
    nodes = iter(tree.node.tolist())
    for row, group in zip(rows_of(rollouts), rollouts.group.tolist(), strict=True):
        for t in range(len(row["token_ids"])):
            node, path = next(nodes), (group, *row["token_ids"][: t + 1])
            assert named.setdefault(node, path) == path
            parent = int(tree.parent[node])
            assert before.setdefault(parent, path[:-1]) == path[:-1]
    # As many as there are: none is split in two, and some are shared.
    assert sorted(named) == list(range(tree.num_nodes))
    assert len(set(named.values())) == tree.num_nodes < rollouts.num_tokens
    assert len(set(before.values())) == len(before)


def test_tokens_of_any_size_do_not_run_into_each_other():
    # In a key of prefix * vocabulary + token, a token over the vocabulary would look like another prefix's.
    rollouts = Rollouts.from_lists(prompts=[[1]] * 2, group=[0, 1, 0, 1], completions=[[300], [0], [0], [151_000]])
    assert len(set(PrefixTree.from_rollouts(rollouts).node.tolist())) == 4


def test_the_tree_of_nobody_is_empty():
    tree = PrefixTree.from_rollouts(Rollouts.from_lists([[1, 2]], [], []))
    assert (tree.num_nodes, len(tree.node)) == (0, 0)
    assert torch.equal(tree.parent, torch.zeros(0, dtype=torch.int64))


def test_context_is_part_of_a_prefix_and_has_no_node_of_its_own():
    # Drawn 7, given 20 or 21 or nothing, drawn 8: three prefixes of 8. In the last, 7 itself is given.
    drawn = [[True, False, True], [True, False, True], [True, False, True], [True, True], [False, False, True]]
    rollouts = Rollouts.from_lists([[1]], [0] * 5, [[7, 20, 8], [7, 20, 8], [7, 21, 8], [7, 8], [7, 20, 8]], drawn)
    tree = PrefixTree.from_rollouts(rollouts)
    a7, a8, b7, b8, c7, c8, d7, d8, e8 = tree.node.tolist()
    assert a7 == b7 == c7 == d7
    assert a8 == b8 == e8
    assert len({a7, a8, c8, d8}) == tree.num_nodes == 4
    parent = tree.parent.tolist()
    assert len({parent[node] for node in (a7, a8, c8, d8)}) == 4
    assert all(0 <= index < tree.num_parents for index in parent)
