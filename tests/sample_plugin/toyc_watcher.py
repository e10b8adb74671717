"""Counts lookups and stores of toyc, inside the program that uses it."""


def watch(toyc, notes):
    def looked(call):
        if call.error is None:
            event = "miss" if call.value is None else "hit"
            notes.add(call.start, event=event, layer="toyc")

    def kept(call):
        if call.error is None:
            notes.add(call.start, event="store", layer="toyc")

    notes.wrap(toyc, "find", looked)
    notes.wrap(toyc, "keep", kept)
