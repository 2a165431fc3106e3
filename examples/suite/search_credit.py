"""Credit for the two agents of the search task: each is compared with its own kind in the Group.

Named by `--agentic-custom-advantage-path examples.suite.search_credit.advantage`.
"""


def advantage(metadata_by_slot):
    """Credit of every context of a Group, one mapping a Session.

    searcher: 1 if it found the note, less the mean over the Group's searchers.
    solver: 1 if its answer is right, less the mean over the Group's solvers that had the right note. A solver that was
    given a wrong note could do nothing about it: 0.
    """
    found = [contexts["searcher"]["found"] for contexts in metadata_by_slot]
    solved = [c["solver"]["right"] for c in metadata_by_slot if "solver" in c and c["solver"]["had_note"]]
    found_mean = sum(found) / len(found)
    solved_mean = sum(solved) / len(solved) if solved else 0.0
    given = []
    for contexts in metadata_by_slot:
        credit = {"searcher": contexts["searcher"]["found"] - found_mean}
        if "solver" in contexts:
            solver = contexts["solver"]
            credit["solver"] = solver["right"] - solved_mean if solver["had_note"] else 0.0
        given.append(credit)
    return given
