"""Runs outlines_core in a process of its own, because a regex can take any amount of time and memory there.

A script, not a module of the package: ``python -I dfa_worker.py FOLDER MEMORY SECONDS``, FOLDER having outlines_core.
Reads requests from stdin, one JSON object per line: {"regex": str} or {"schema": str, "whitespace": str | null}, and
"max_states". Answers each with a line of JSON: {"error": str, "kind": str}, or {"states", "start", "final", "edges"}
followed by the edges as three int32 arrays (source, byte, target). Ends when stdin does.
"""

import array
import json
import sys

END = "\U0010ffff"  # ends every text; see dfa.py


def limit(memory, seconds=None):
    """Lets the system end this process when it takes too much. Not everywhere possible; the parent has a timer too."""
    try:
        import resource

        if seconds is None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
        else:
            used = resource.getrusage(resource.RUSAGE_SELF)
            soft = int(used.ru_utime + used.ru_stime + seconds) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        pass


def automaton(core, vocabulary, regex):
    """(start, transitions, final states) of "regex, then END".

    The library also builds the automaton of a search that may begin anywhere, and throws it away. That one needs 2**n
    states for a JSON string of up to n characters. A search that may be satisfied with the empty text at its beginning
    never begins anywhere else, so the regex becomes optional; an alternative that comes last in the order of
    preference changes no other match. The library then leaves out the edge of the very first byte (it takes the
    match of the empty text for one that has gone on). So two bytes without meaning are put before the regex: the
    state between them is the one that no edge leads to and that knows only the second byte.
    """
    index = core.Index("(?:\\x02\\x03(?:" + regex + ")" + END + ")?", vocabulary)
    transitions = index.get_transitions()
    reached = {target for row in transitions.values() for byte, target in row.items() if byte < 256}
    between = [
        row for state, row in transitions.items() if state not in reached and row.keys() - {256} == {3}
    ]
    if len(between) == 1:
        return between[0][3], transitions, set(index.get_final_states()) - {index.get_initial_state()}
    index = core.Index("(?:" + regex + ")" + END, vocabulary)  # right too, but may take much longer
    return index.get_initial_state(), index.get_transitions(), index.get_final_states()


def answer(core, vocabulary, request):
    """The automaton of one request: (header, arrays)."""
    regex = request.get("regex")
    if regex is None:
        try:
            regex = core.json_schema.build_regex_from_schema(request["schema"], request["whitespace"])
        except Exception as error:
            return {"error": str(error).split("\n")[0], "kind": "schema"}, ()
    try:
        start, transitions, final = automaton(core, vocabulary, regex)
    except Exception as error:
        return {"error": str(error), "kind": "regex"}, ()
    states = {start: 0}
    for state in (*transitions, *final):
        states.setdefault(state, len(states))
    # States that only the end mark leads to are dropped by the caller, who then counts again.
    if len(states) > 2 * request["max_states"] + 4:
        return {"error": f"more than {request['max_states']} states", "kind": "large"}, ()
    columns = (array.array("i"), array.array("i"), array.array("i"))
    for source, row in transitions.items():
        for byte, target in row.items():
            if byte < 256:
                columns[0].append(states[source])
                columns[1].append(byte)
                columns[2].append(states[target])
    header = {
        "states": len(states),
        "start": 0,
        "final": [states[s] for s in final],
        "edges": len(columns[0]),
    }
    return header, columns


def main(folder, memory, seconds):
    sys.path.append(folder)
    import outlines_core as core

    limit(int(memory))
    vocabulary = core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    while line := sys.stdin.buffer.readline():
        limit(int(memory), float(seconds))
        try:
            header, columns = answer(core, vocabulary, json.loads(line))
        except MemoryError:
            header, columns = {"error": "memory", "kind": "memory"}, ()
        sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
        for column in columns:
            sys.stdout.buffer.write(column.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
