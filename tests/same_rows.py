"""One text read in two ways, whose rows must have the same bits: one by one, and as guesses in trees.

A `model` has a `cache`, and `read(rows, num_text_rows)`, which computes rows of (node, parent, position, token).
"""
import torch

LENGTH, PROMPT = 60, 37  # tokens of a text, and of the prompt with which it begins
PROMPT_CHUNKS = (0, 3), (3, 20), (20, 21), (21, PROMPT)


def chain(text):
    """Return the rows of a text, each below the one before it."""
    return [(i, max(i - 1, 0), i, token) for i, token in enumerate(text)]


def alone(model, text):
    """Return the results for each token of a text, computed one by one after a prompt."""
    rows = chain(text)
    model.cache.clear()
    results = [model.read(rows[:PROMPT], PROMPT)]
    return torch.cat(results + [model.read([row], 1) for row in rows[PROMPT:]])


def in_trees(model, text, rng, vocab_size):
    """Return the same for a prompt in unequal chunks, and for the rest as guesses among incorrect ones."""
    rows = chain(text)
    model.cache.clear()
    results = [model.read(rows[start:end], end - start) for start, end in PROMPT_CHUNKS]

    tip, node, num_read = PROMPT - 1, 1000, PROMPT
    while num_read < len(text):
        rows, right_rows, path = [], [], [tip]
        for position in range(num_read, min(num_read + rng.randrange(1, 10), len(text))):
            for token in [*rng.sample(range(vocab_size), rng.randrange(4)), text[position]]:
                rows.append((node, path[-1], position, token))
                node += 1
            right_rows.append(len(rows) - 1)
            path.append(node - 1)

        results.append(model.read(rows, 0)[right_rows])
        tip, num_read = path[-1], num_read + len(right_rows)
        model.cache.prune(tip, path[-2], [], node)
    return torch.cat(results)
