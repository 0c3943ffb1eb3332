"""Responses as segment trees: those to one prompt share its computation."""

from __future__ import annotations

from collections.abc import Sequence

from accord.data.trees import Tree, branching


def prompt_trees(
    prompts: Sequence[Sequence[int]],  # [R] prompt tokens of each response
    responses: Sequence[Sequence[int]],  # [R]
    max_tokens: int,
) -> tuple[list[Tree], list[list[int]]]:
    """Trees of at most `max_tokens` tokens, and for each the numbers of its responses, in the order of its leaves.

    Responses to equal prompts share one; what does not fit goes on with a copy of the prompt. Every response token is a target.
    A response that does not fit even alone keeps a tree to itself: `pack_trees` refuses it.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_prompt.setdefault(tuple(prompt), []).append(number)
    trees: list[Tree] = []
    members: list[list[int]] = []
    for prompt, numbers in by_prompt.items():
        group: list[int] = []
        used = len(prompt)
        for number in numbers:
            length = len(responses[number])
            if group and used + length > max_tokens:
                trees.append(branching(prompt, [responses[i] for i in group]))
                members.append(group)
                group, used = [], len(prompt)
            group.append(number)
            used += length
        trees.append(branching(prompt, [responses[i] for i in group]))
        members.append(group)
    return trees, members
