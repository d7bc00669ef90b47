"""Generated stories: answers and supporting facts against solvers that see only the text."""

import re
from collections import Counter, deque

import pytest
from babi import GENERATORS, SCALES, Vocabulary, generate_stories

MOVE = re.compile(r"(\w+) (?:went|went back|moved|journeyed|travelled) to the (\w+)\.")
TAKE = re.compile(r"(\w+) (?:got|grabbed|picked up|took) the (\w+)(?: there)?\.")
DROP = re.compile(r"(\w+) (?:dropped|discarded|left|put down) the (\w+)(?: there)?\.")
RULE = re.compile(r"(\w+) are afraid of (\w+)\.")
KIND = re.compile(r"(\w+) is a (\w+)\.")
LIES = re.compile(r"The (\w+) is (north|east|south|west) of the (\w+)\.")
PLURALS = {"mice": "mouse", "wolves": "wolf", "sheep": "sheep", "foxes": "fox"}
STEPS = {"north": "n", "east": "e", "south": "s", "west": "w"}
BACK = {"n": "s", "s": "n", "e": "w", "w": "e"}


def parts(pattern, text):
    """The groups of a pattern that must match the whole text."""
    match = pattern.fullmatch(text)
    assert match, text
    return match.groups()


def stories_of(task, scale=1, count=60):
    return generate_stories(task, count, seed=5, scale=scale)


class Replay:
    """Where people are and where things have been, from the facts alone."""

    def __init__(self):
        self.where, self.carrier, self.been = {}, {}, {}

    def see(self, text):
        if match := MOVE.fullmatch(text):
            person, room = match.groups()
            assert self.where.get(person) != room, "nobody goes where they are"
            self.where[person] = room
            for thing, carrier in self.carrier.items():
                if carrier == person:
                    self.been[thing].append(room)
        elif match := TAKE.fullmatch(text):
            person, thing = match.groups()
            assert thing not in self.carrier, "a thing that is carried cannot be taken"
            assert thing not in self.been or self.been[thing][-1] == self.where[person], "a thing is taken where it is"
            self.been.setdefault(thing, [self.where[person]])
            self.carrier[thing] = person
        else:
            person, thing = parts(DROP, text)
            assert self.carrier.pop(thing) == person, "only its carrier drops a thing"


def answer_of(replay, question):
    """The answer to a question of tasks 1 to 3."""
    words = question.words()
    if words[1] == "was":
        thing, room = words[3], words[-3]
        arrivals = [i for i, visited in enumerate(replay.been[thing]) if visited == room and i > 0]
        return replay.been[thing][arrivals[-1] - 1]
    if words[2] == "the":
        return replay.been[words[3]][-1]
    return replay.where[words[2].capitalize()]


def facts_of(story, ids):
    return [story.lines[i - 1].text for i in ids]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("task", [1, 2, 3])
def test_answers_agree_with_a_replay_of_the_world(task, scale):
    asked = 0
    for story in stories_of(task, scale):
        replay = Replay()
        for line in story.lines:
            if line.answer:
                assert line.answer == answer_of(replay, line), story
                asked += 1
            else:
                replay.see(line.text)
    assert asked == 60 * {1: 5, 2: 3, 3: 3}[task]


def test_one_fact_supports_an_answer_alone():
    for story in stories_of(1):
        for question in story.questions:
            (fact,) = facts_of(story, question.support)
            person, room = parts(MOVE, fact)
            assert (person.lower(), room) == (question.words()[2], question.answer)


def test_support_of_one_fact_is_the_last_move():
    for story in stories_of(1):
        for place, line in enumerate(story.lines):
            if line.answer:
                name = line.words()[2].capitalize()
                moves = [i for i, fact in enumerate(story.lines[:place], 1) if fact.text.startswith(f"{name} ")]
                assert line.support == (moves[-1],)


def test_two_facts_support_where_a_thing_is():
    dropped = 0
    for story in stories_of(2):
        for number, line in enumerate(story.lines, start=1):
            if not line.answer:
                continue
            thing = line.words()[3]
            first, second = facts_of(story, line.support)
            about = [i for i, fact in enumerate(story.lines[: number - 1], 1) if names_thing(fact, thing)]
            assert about[-1] in line.support, "the last that was heard of the thing"
            (move,) = [fact for fact in (first, second) if MOVE.fullmatch(fact)]
            (deed,) = [fact for fact in (first, second) if not MOVE.fullmatch(fact)]
            person, room = parts(MOVE, move)
            assert room == line.answer
            assert deed.startswith(f"{person} ")
            if DROP.fullmatch(deed):
                dropped += 1
                assert second == deed, "dropped where the carrier had gone before"
                assert not moves_between(story, person, *line.support), "and had stayed"
            else:
                move_id = next(i for i in line.support if story.lines[i - 1].text == move)
                assert not moves_between(story, person, move_id, number), "the carrier's last move"
    assert dropped > 10


def names_thing(line, thing):
    return not line.answer and not MOVE.fullmatch(line.text) and thing in line.words()


def moves_between(story, person, first, last):
    """Moves of a person after one line and before another."""
    lines = story.lines[first : last - 1]
    return [
        line.text
        for line in lines
        if not line.answer and MOVE.fullmatch(line.text.strip()) and line.text.startswith(f"{person} ")
    ]


def test_three_facts_support_where_a_thing_was():
    for story in stories_of(3):
        for question in story.questions:
            thing, room = question.words()[3], question.words()[-3]
            facts = facts_of(story, question.support)
            (take,) = [fact for fact in facts if TAKE.fullmatch(fact)]
            person, taken = parts(TAKE, take)
            moves = [parts(MOVE, fact) for fact in facts if fact != take]
            assert taken == thing
            assert moves == [(person, question.answer), (person, room)]
            come, gone = (i for i in question.support if story.lines[i - 1].text != take)
            assert not moves_between(story, person, come, gone), "one move after the other"
            took = next(i for i in question.support if story.lines[i - 1].text == take)
            dropped = [line for line in story.lines[took:gone] if not line.answer and DROP.fullmatch(line.text)]
            assert took < gone
            assert not any(thing in line.words() for line in dropped), "carried all the way"


@pytest.mark.parametrize("scale", SCALES)
def test_deduction_follows_from_a_kind_and_a_rule(scale):
    for story in stories_of(15, scale):
        facts = [line.text for line in story.lines if not line.answer]
        rules = {plural.lower(): feared for plural, feared in (m.groups() for m in map(RULE.fullmatch, facts) if m)}
        rules = {PLURALS.get(kind, kind[:-1]): PLURALS.get(other, other[:-1]) for kind, other in rules.items()}
        kinds = {name.lower(): kind for name, kind in (m.groups() for m in map(KIND.fullmatch, facts) if m)}
        assert len(rules) == len(kinds) == 4 * scale
        assert len(facts) == 8 * scale, "all names and kinds differ"
        assert len({question.words()[2] for question in story.questions}) == 4
        for question in story.questions:
            name = question.words()[2]
            assert question.answer == rules[kinds[name]] != kinds[name]
            about = [
                i
                for i, fact in enumerate(facts, 1)
                if fact.lower().startswith((f"{name} is a", plural_of(kinds[name])))
            ]
            assert question.support == tuple(about)


def plural_of(kind):
    return {single: plural for plural, single in PLURALS.items()}.get(kind, f"{kind}s") + " are"


def adjacent_rooms(story):
    """Per room: direction, adjacent room and the number of the fact that says so."""
    near = {}
    for number, line in enumerate(story.lines, start=1):
        if match := LIES.fullmatch(line.text):
            there, direction, here = match.groups()
            step = STEPS[direction]
            near.setdefault(here, []).append((step, there, number))
            near.setdefault(there, []).append((BACK[step], here, number))
    return near


@pytest.mark.parametrize("scale", SCALES)
def test_paths_are_the_only_shortest_ones(scale):
    answers = Counter()
    for story in stories_of(19, scale):
        (question,) = story.questions
        start, goal = question.words()[6], question.words()[-3]
        near, found, queue = adjacent_rooms(story), [], [((), (), start)]
        while queue and len(queue[0][0]) <= 2:  # breadth first, all paths of at most two steps
            steps, facts, room = queue.pop(0)
            if room == goal:
                found.append((steps, facts))
            queue += [((*steps, step), (*facts, fact), there) for step, there, fact in near[room]]
        assert [",".join(steps) for steps, _ in found] == [question.answer], "one path, and no shorter one"
        assert question.support == tuple(sorted(found[0][1]))
        assert len(near) == 5 * scale + 1
        answers[question.answer] += 1
    assert answers.keys() <= {f"{a},{b}" for a in "nesw" for b in "nesw" if BACK[a] != b}
    assert len(answers) > 8


@pytest.mark.parametrize("scale", SCALES)
def test_rooms_have_one_place_on_a_grid(scale):
    offset = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}
    for story in stories_of(19, scale):
        near = adjacent_rooms(story)
        places, queue = {next(iter(near)): (0, 0)}, deque(near)
        while queue:
            here = queue.popleft()
            if here not in places:
                queue.append(here)
                continue
            for step, there, _ in near[here]:
                place = (places[here][0] + offset[step][0], places[here][1] + offset[step][1])
                assert places.setdefault(there, place) == place
        assert len(set(places.values())) == len(near), "no two rooms in one place"


@pytest.mark.parametrize("task", GENERATORS)
def test_larger_stories_have_more_facts_of_the_same_words(task):
    small = Vocabulary.of(stories_of(task, 1, 100))
    for scale, least in ((2, 1.4), (3, 1.9)):
        larger = stories_of(task, scale, 20)
        assert not any(small.unknown in small.encode(story.words()) for story in larger)
        facts = [
            sum(len(story.lines) - len(story.questions) for story in some) for some in (stories_of(task, 1, 20), larger)
        ]
        assert facts[1] > least * facts[0]


@pytest.mark.parametrize("task", GENERATORS)
def test_the_same_seed_gives_the_same_stories(task):
    some = generate_stories(task, 5, seed=3)
    assert some == generate_stories(task, 9, seed=3)[:5]
    assert (
        len(set(some) | set(generate_stories(task, 5, seed=4)) | set(generate_stories(task, 5, seed=3, scale=2))) == 15
    )
    assert all(story.task == task for story in some)


def test_numbers_of_facts():
    counts = {task: [len(s.lines) - len(s.questions) for s in stories_of(task)] for task in GENERATORS}
    assert set(counts[1]) == {10}
    assert set(counts[15]) == {8}
    assert set(counts[19]) == {5}
    assert min(counts[2]) == 12
    assert min(counts[3]) == 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": 4}, "task must be one of .*, got 4"),
        ({"count": 0}, "count must be an integer >= 1, got 0"),
        ({"scale": 0}, "scale must be one of .*, got 0"),
        ({"scale": 4}, "scale must be one of .*, got 4"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        generate_stories(**{"task": 1, "count": 1, "seed": 0} | options)
