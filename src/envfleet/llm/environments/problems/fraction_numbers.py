"""Word problems whose numbers are fractions."""

from __future__ import annotations

from fractions import Fraction

from envfleet.llm.environments.problems.story import PEOPLE, Draw, Story, Template


def left_of_a_cake(draw: Draw, story: Story) -> None:
    """A sum, then what is left of 1."""
    a, b = draw.some(PEOPLE, 2)
    what = draw.one_of(("cake", "pizza", "melon", "pie", "loaf of bread"))
    first, second = draw.proper_fraction((4, 5, 6, 7, 8)), draw.proper_fraction((3, 4, 6, 8, 9))
    # Halves of what was drawn, if together it would be all of it or more.
    while first + second >= 1:
        first, second = first / 2, second / 2
    story.tell(
        f"{a.name} eats {first} of a {what}, and {b.name} eats {second} of the same {what}.",
        f"What fraction of 1 whole {what} is left?",
    )
    eaten = story.work("Together they eat {} of it.", first, "+", second)
    story.work("There is {} of it left.", 1, "-", eaten)


def batches(draw: Draw, story: Story) -> None:
    """One product."""
    who = draw.one_of(PEOPLE)
    cups, count = draw.proper_fraction((3, 4, 5, 8)) + draw.whole(0, 1), draw.whole(2, 9)
    what = draw.one_of(("flour", "milk", "sugar", "oats"))
    measure = f"{cups} of a cup" if cups < 1 else f"{cups} cups"
    story.tell(
        f"For one batch of pancakes {who.name} needs {measure} of {what}.",
        f"How many cups of {what} does {who.they} need for {count} batches?",
    )
    story.work(f"{who.name} needs {{}} cups of {what}.", cups, "*", count)


def part_of_a_part(draw: Draw, story: Story) -> None:
    """One product of fractions."""
    first, second = draw.proper_fraction((3, 4, 5, 7)), draw.proper_fraction((3, 4, 5, 6, 8))
    told, asked, says = draw.one_of(
        (
            (
                f"{first} of a garden is lawn, and {second} of the lawn is in the shade.",
                "What fraction of the garden is lawn in the shade?",
                "Lawn in the shade is {} of the garden.",
            ),
            (
                f"{first} of the books in a library are novels, and {second} of the novels are "
                "mysteries.",
                "What fraction of all the books are mysteries?",
                "Mysteries are {} of the books.",
            ),
            (
                f"{first} of the land of a farm is fields, and wheat grows on {second} of the "
                "fields.",
                "On what fraction of the land does wheat grow?",
                "Wheat grows on {} of the land.",
            ),
        )
    )
    story.tell(told, asked)
    story.work(says, first, "*", second)


def chance(draw: Draw, story: Story) -> None:
    """A sum, then a fraction of it."""
    wanted, other, third = draw.some(("red", "blue", "green", "white", "black", "yellow"), 3)
    a, b, c = draw.whole(2, 12), draw.whole(2, 12), draw.whole(2, 9)
    story.tell(
        f"A bag holds {a} {wanted}, {b} {other} and {c} {third} balls.",
        "One ball is drawn without looking.",
        f"What is the probability that it is {wanted}?",
    )
    balls = story.work("There are {} balls.", a, "+", b, "+", c)
    story.work("The probability is {}.", a, "/", balls)


def water_tank(draw: Draw, story: Story) -> None:
    """A product, then a difference."""
    below = draw.one_of((8, 10, 12, 15, 16))
    days = draw.whole(2, 4)
    full = Fraction(draw.whole(days + 1, below - 1), below)
    used = Fraction(1, below)
    story.tell(
        f"A water tank is {full} full.",
        f"Every day {used} of the whole tank is used, and no rain falls.",
        f"What fraction of the tank is full after {days} days?",
    )
    gone = story.work(f"In {days} days {{}} of the tank is used.", used, "*", days)
    story.work("After that {} of the tank is full.", full, "-", gone)


def painting(draw: Draw, story: Story) -> None:
    """A sum of two rates, and the time that both take."""
    a, b = draw.some(PEOPLE, 2)
    one, other = draw.some((2, 3, 4, 5, 6, 8, 10, 12), 2)
    what = draw.one_of(("fence", "wall", "shed", "boat"))
    story.tell(
        f"{a.name} paints 1 {what} in {one} hours, and {b.name} paints 1 {what} of the same size "
        f"in {other} hours.",
        f"How many hours do they need for 1 such {what} if they work together at these speeds?",
    )
    first = story.work(f"In an hour {a.name} paints {{}} of it.", 1, "/", one)
    second = story.work(f"In an hour {b.name} paints {{}} of it.", 1, "/", other)
    both = story.work("In an hour they paint {} of it together.", first, "+", second)
    story.work("Together they need {} hours.", 1, "/", both)


FRACTION_NUMBERS: tuple[Template, ...] = (
    left_of_a_cake, batches, part_of_a_part, chance, water_tank, painting,
)  # fmt: skip
