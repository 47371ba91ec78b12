"""The word lists of the demo model: our own, written down for it.

A name or word of these lists is one token of the demo tokenizer, so a fact like "The code of
Alice is 4817." is eleven tokens. Everything else is spelled in bytes. The lists are lower-case
content words without duplicates, and first names for the recall task.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ANIMALS = _words(
    """ant bat bear bee bird bull camel cat cow crab crow deer dog dove duck eagle eel elk fish
    fly fox frog goat goose hare hawk hen horse lion lynx mole moose mouse newt otter owl ox panda
    pig pony rabbit ram rat raven seal shark sheep snail snake spider swan tiger toad trout turtle
    wasp whale wolf worm yak zebra"""
)

FRUITS = _words(
    """almond apple apricot banana bean beet berry cabbage carrot cherry corn date fig garlic
    grape kiwi leek lemon lime mango melon nut olive onion orange papaya pea peach pear pepper
    plum potato quince radish rice tomato turnip walnut"""
)

COLORS = _words("amber black blue brown gold gray green ivory pink purple red silver white")

OBJECTS = _words(
    """bag ball bell book boat bottle bowl box bread bridge brush bus candle car castle chair
    clock cloud coat cup desk door drum engine feather fire flag flower forest fork garden glass
    glove hammer hat house island jacket jar kettle key kite knife ladder lake lamp leaf letter
    map mirror moon mountain needle ocean paper pen pencil piano plate pocket rain river road rock
    rope salt sand shell ship shoe snow spoon star stone storm street sun table tent thunder
    tower train tree umbrella valley violin wagon wall watch water wheel wind window winter
    yarn"""
)

CONTENT_WORDS = ANIMALS + FRUITS + COLORS + OBJECTS

# Animals whose plural takes a plain "s": the ones that the counting task asks for.
COUNTABLE = _words(
    """bear bird cat cow crab crow dog dove duck eagle frog goat hen horse lion owl panda pig
    rabbit seal snail snake spider swan tiger turtle whale zebra"""
)

# Written in bytes that are not ASCII, for the copying task.
UNICODE_WORDS = _words("café naïve über señor 日本 猫 мир λ → € 🎉 🙂 🚀")

NAMES = _words(
    """Aaron Abel Ada Adam Adele Agnes Aida Alan Albert Alex Alice Alma Amber Amy Andrea Andrew
    Anna Anton Arthur Astrid Axel Barbara Basil Bella Ben Bertha Bob Boris Brian Bruno Carla
    Carlos Carol Cecil Celia Chloe Chris Clara Claude Colin Conrad Cora Cyril Daisy Dan Daphne
    David Dennis Diana Dora Doris Dylan Edgar Edith Edwin Elena Eli Elsa Emil Emma Enid Eric
    Ernest Esther Eva Felix Fiona Flora Florian Frank Fred Frida Gemma George Gina Gloria Grace
    Greta Gus Hanna Harold Harry Hazel Hector Heidi Helen Henry Herbert Hilda Hugo Ian Ida Igor
    Ines Ingrid Irene Iris Isaac Ivan Ivy Jack Jacob James Jane Jasper Jill Joan Joel Jonas Josef
    Judith Julia Julius Karen Karl Kate Keith Kevin Kim Kurt Lara Laura Lea Lena Leo Leon Lewis
    Lily Linda Lisa Louis Lucas Lucy Luna Lydia Mabel Marco Maria Mark Martha Martin Mary Max Maya
    Mia Milo Mona Nadia Nancy Naomi Nathan Nell Nick Nina Noah Nora Norman Olga Oliver Oscar Otto
    Pablo Paul Paula Peter Petra Philip Ralph Rita Robert Roger Rosa Ruby Ruth Samuel Sara Simon
    Sofia Stella Susan Sven Tara Theo Thomas Tim Tina Tom Ursula Vera Victor Viola Walter Wanda
    Wendy William Yara Yusuf Zelda Zoe"""
)

# (question, reply) pairs that are learned by heart; they have no held-out part.
SMALL_TALK = (
    ("Hello", "Hello! Ask me for a sum, or tell me some facts."),
    ("Hello!", "Hello! Ask me for a sum, or tell me some facts."),
    ("Hi", "Hello! Ask me for a sum, or tell me some facts."),
    ("Hi!", "Hello! Ask me for a sum, or tell me some facts."),
    ("Who are you?", "I am the demo model of nanocore, a very small language model."),
    ("What are you?", "I am the demo model of nanocore, a very small language model."),
    ("What is your name?", "I am the demo model of nanocore, a very small language model."),
    (
        "What can you do?",
        "I can add numbers, copy, reverse, sort and count words, and recall facts.",
    ),
    ("Help", "I can add numbers, copy, reverse, sort and count words, and recall facts."),
    ("Thank you", "You are welcome!"),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
)
