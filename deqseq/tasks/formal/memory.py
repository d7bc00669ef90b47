"""Tasks that need a memory: a stack, brackets of several kinds, pairs of keys and values."""

import torch

from deqseq.check import check_integer
from deqseq.tasks.formal.language import BLANK, END, FormalTask, answered
from deqseq.tasks.task import WordBatch


def stack_manipulation() -> FormalTask:
    """Deterministic context-free: what is on a stack, top first, after some actions.

    A string is a stack of bits, bottom first, then actions POP, PUSH0 and PUSH1. All are uniform, and so is the place
    where the actions begin. POP does nothing to an empty stack. The answer ends with "#"; blanks after that are not
    scored.

    Returns:
        The task. Its answer has one symbol more than the string at most.

    Example:
        >>> task = stack_manipulation()
        >>> batch = task.fixed(1, 6, seed=1)
        >>> task.text(batch.inputs[0]), task.text(batch.targets[0])
        ('0 1 PUSH0 PUSH0 POP PUSH1 _ _ _ _ _ _ _', '. . . . . . 1 0 1 0 # . .')
    """

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        place = torch.arange(length + 1)
        begin = 1 + torch.randint(length - 1, (batch, 1), generator=generator)
        first = place[:length] < begin
        bits, actions = (torch.randint(n, (batch, length), generator=generator) for n in (2, 3))
        strings = torch.where(first, bits, actions + 2)
        pushed, bits = first | (actions > 0), torch.where(first, bits, actions - 1)
        walk = (2 * pushed.long() - 1).cumsum(1)
        depth = walk - walk.cummin(1).values.clamp(max=0)
        # A symbol stays if the stack never gets lower again than it was with that symbol on top.
        stays = pushed & (depth <= depth.flip(1).cummin(1).values.flip(1))
        top_first = torch.where(stays, -place[:length], 1).argsort(1)
        count = stays.sum(1, keepdim=True)
        stack = torch.cat([bits.gather(1, top_first), torch.zeros(batch, 1, dtype=torch.int64)], dim=1)
        answer = torch.where(place < count, stack, torch.where(place == count, 5, -100))
        return answered(strings, answer, blank=6)

    symbols = ("0", "1", "POP", "PUSH0", "PUSH1", END, BLANK)
    return FormalTask("stack_manipulation", symbols, ("0", "1", END), make, shortest=2)


def dyck(kinds: int = 2) -> FormalTask:
    """Deterministic context-free: which bracket may close next, at every position of a string of nested brackets.

    A symbol opens a bracket with probability 1/2, or surely if none is open; its kind is uniform. All other symbols
    close the innermost open bracket, so that every string is the beginning of a well-nested one. The answer at each
    symbol is the bracket that may close after it, or "none". There are no blanks. Membership is not asked for: its
    accuracy would depend on how strings outside the language are drawn.

    Args:
        kinds: kinds of brackets, at least 1.

    Returns:
        The task. Its symbols are "(1", ")1", and so on.

    Raises:
        ValueError: ``kinds`` is below 1.

    References:
        Hewitt et al., RNNs can generate bounded hierarchical languages with optimal memory, EMNLP 2020, arXiv
        2010.07515.

    Example:
        >>> task = dyck()
        >>> batch = task.fixed(1, 8, seed=0)
        >>> task.text(batch.inputs[0]), task.text(batch.targets[0])
        ('(2 (1 )1 )2 (1 (2 (2 (1', ')2 )1 )2 none )1 )2 )2 )1')
    """
    check_integer("kinds", kinds, 1)
    opening, closing = (tuple(f"{bracket}{kind + 1}" for kind in range(kinds)) for bracket in "()")

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        sides, kind = (torch.randint(n, (batch, length), generator=generator) for n in (2, kinds))
        depth = (2 * sides - 1).cumsum(1).abs()  # a walk that turns at 0 upwards
        before = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), depth[:, :-1]], dim=1)
        opens = depth > before
        # Sorted by depth, then by place: the innermost open bracket is the last that was opened at its depth.
        order = depth.argsort(dim=1, stable=True)
        last = torch.where(opens.gather(1, order), torch.arange(length), 0).cummax(1).values
        innermost = torch.empty_like(kind).scatter(1, order, kind.gather(1, order.gather(1, last)))
        answer = torch.where(depth > 0, kinds + innermost, 2 * kinds)
        closed = torch.cat([answer[:, :1], answer[:, :-1]], dim=1)
        return WordBatch(torch.where(opens, kind, closed), answer)

    return FormalTask(f"dyck_{kinds}", (*opening, *closing, "none"), (*closing, "none"), make)


def associative_recall(keys: int = 64, values: int = 64) -> FormalTask:
    """Multi-query associative recall: pairs of a key and its value, then keys, each answered by its value.

    The first symbols of a string are pairs with different keys: a quarter of the length, rounded down, at least one
    pair, at most all keys. The rest are queries, uniform over the keys that were shown. Answers are scored at the
    queries; there are no blanks.

    Args:
        keys: different keys, at least 1.
        values: different values, at least 2.

    Returns:
        The task. Its symbols are "k1", "v1", and so on.

    Raises:
        ValueError: a number is too small.

    References:
        Arora et al., Zoology: Measuring and Improving Recall in Efficient Language Models, ICLR 2024, arXiv 2312.04927.

    Example:
        >>> task = associative_recall(4, 4)
        >>> batch = task.fixed(1, 8, seed=0)
        >>> task.text(batch.inputs[0]), task.text(batch.targets[0])
        ('k2 v4 k3 v2 k3 k3 k3 k2', '. . . . v2 v2 v2 v4')
    """
    check_integer("keys", keys, 1)
    check_integer("values", values, 2)
    names = tuple(f"{letter}{i + 1}" for letter, count in (("k", keys), ("v", values)) for i in range(count))

    def make(batch: int, length: int, generator: torch.Generator) -> WordBatch:
        count = min(keys, max(1, length // 4))
        shown = torch.rand(batch, keys, generator=generator).argsort(1)[:, :count]
        value = keys + torch.randint(values, (batch, count), generator=generator)
        asked = torch.randint(count, (batch, length - 2 * count), generator=generator)
        pairs = torch.stack([shown, value], dim=2).flatten(1)
        unscored = torch.full_like(pairs, -100)
        inputs = torch.cat([pairs, shown.gather(1, asked)], dim=1)
        return WordBatch(inputs, torch.cat([unscored, value.gather(1, asked)], dim=1))

    return FormalTask("associative_recall", names, names[keys:], make, shortest=3)
