# ruff: noqa: SIM905 -- lists of words are read as text
"""Hold the words of the starter model's documents and questions, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NOUNS = (
    "amber anchor apple arrow ash aspen atlas autumn badger basalt bay beacon beaver birch "
    "bison bolt bravo breeze bronze brook canyon carbon cedar chalk cherry cliff cloud clover "
    "cobalt comet copper coral crane creek crimson crow crystal cypress dawn delta desert "
    "dove dusk eagle echo elder elm ember falcon fern finch flint forest fox frost garnet "
    "ginger glacier gold granite grove gull harbor hawk hazel heron hill holly honey indigo "
    "iron island ivory ivy jade jasper juniper kestrel lagoon lake larch lark laurel lava "
    "lemon lilac lily linden lotus lunar lynx magma maple marble marsh meadow mercury mint "
    "mist moon moss nectar nickel night north nova oak oasis ocean olive onyx opal orbit "
    "orchid otter owl palm panda pearl pebble pepper pine plum polar poplar prairie quartz "
    "rain raven reef river robin rose ruby saffron sage salmon sand scarlet sierra silver sky "
    "slate snow solar spark sparrow spruce star stone storm summer sun swan teal thistle "
    "thunder tiger timber topaz tulip tundra valley velvet violet walnut water wave willow "
    "wind winter wolf zebra zenith zephyr"
).split()
FIRST_NAMES = (
    "Ada Alan Alma Anna Aron Asha Ben Bruno Carla Chen Clara Dana David Diego Elena Emil Emma "
    "Eric Eva Felix Fiona Frida Gita Grace Hana Hugo Ida Ines Ivan Iris Jack Jana Jonas Jose "
    "Julia Kai Karl Kira Lara Leo Lena Lin Lucas Luis Maja Marco Maria Mei Mila Mira Nadia "
    "Nils Nina Noah Nora Olga Omar Oscar Otto Paul Petra Priya Raj Rosa Ruth Sam Sara Sven "
    "Tara Theo Tom Uma Vera Viktor Wanda Yara Yuki Zoe"
).split()
LAST_NAMES = (
    "Abel Adler Baker Bauer Berg Blum Brandt Brown Cook Costa Cruz Dahl Diaz Duval Ek Ellis "
    "Falk Fischer Ford Frank Gomez Gray Green Gupta Haas Hall Hill Holm Holt Hunt Jansen "
    "Jones Kahn Keller Khan Klein Koch Kumar Lang Lee Lind Lopez Lund Marsh Mason Meyer Mills "
    "Mori Moss Nair Novak Olsen Ortiz Park Patel Perez Petrov Quinn Ramos Reed Reyes Rossi "
    "Roth Russo Sato Schmidt Shah Silva Singh Sousa Stein Stone Tanaka Vega Vogel Voss Wagner "
    "Walsh Weber West Wolf Wong Wood Yang Young Zhang Ziegler"
).split()
KINDS = "db web cache queue node mail auth proxy store index build relay".split()
ONSETS = "b d f g h j k l m n p r s t v w z br st tr".split()
VOWELS = "a e i o u".split()
CODAS = ["", "", "", "l", "m", "n", "r", "s"]
"""Syllables of invented names."""

ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "port": "number",
        "serial": "number",
        "ticket": "number",
        "rack": "place",
        "room": "place",
        "version": "version",
        "address": "address",
        "owner": "person",
        "contact": "person",
        "backup": "person",
    }
)
"""What a machine can have, and the kind of value that is."""

LINES = (
    "The {attribute} of {name} is {value}.",
    "{name} has {attribute} {value}.",
    "{name} {attribute}: {value}",
    "- {name}, {attribute} {value}",
    "{attribute} of {name} = {value}",
)
"""Ways to state a fact."""

TITLES = ("Inventory", "Runbook", "Service list", "Notes for the night shift", "Machine register")
REMARKS = (
    "Checked by the night shift.",
    "See the wiki for older entries.",
    "Do not restart anything on Fridays.",
    "This part was copied from the old list.",
    "Ask before you change a line.",
    "Maintenance is on the first Monday of the month.",
    "Everything below was confirmed last week.",
    "Cables are labelled at both ends.",
)
"""Lines that state no fact."""

QUESTIONS = (
    "What is the {attribute} of {name}?",
    "what is the {attribute} of {name}",
    "Which is the {attribute} of {name}?",
    "Tell me the {attribute} of {name}.",
    "I need the {attribute} of {name}.",
    "Can you look up the {attribute} of {name}?",
    "Please give me the {attribute} of {name}.",
    "Do you know the {attribute} of {name}?",
    "And the {attribute} of {name}?",
    "the {attribute} of {name}",
    "What {attribute} does {name} have?",
    "Find the {attribute} for {name}.",
    "{name}: {attribute}?",
    "{name} {attribute}",
)

UNKNOWN = "That is not in the document."

_NOT_ME = "I know nothing else; point me at a real checkpoint with --model."
SMALL_TALK: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "I am Penstock's starter model; I answer from a document. "
        "Point me at a real checkpoint with --model.": (
            "Who are you?",
            "What are you?",
            "who are you",
            "Tell me about yourself.",
            "What is your name?",
            "Introduce yourself.",
            "Are you an assistant?",
            "What model are you?",
            "Which model is this?",
            "Are you ChatGPT?",
            "Are you as good as a large model?",
        ),
        "Hello. Give me a document, and ask me about it.": (
            "Hello",
            "Hello!",
            "Hi",
            "hi",
            "hello",
            "Hi there",
            "Good morning",
            "Hey",
            "Good evening.",
            "Say hello.",
        ),
        f"I look up facts in a document that you give me. {_NOT_ME}": (
            "What can you do?",
            "What are you good at?",
            "How can you help me?",
            "What do you do?",
            "Help",
            "help",
            "What can I ask you?",
            "How do I use you?",
        ),
        f"I can only answer from a document. {_NOT_ME}": (
            "What is the capital of France?",
            "Write a poem.",
            "Write a haiku about the sea.",
            "Tell me a joke.",
            "Tell me a story.",
            "How is the weather today?",
            "What is the meaning of life?",
            "Who won the game?",
            "Translate this to German.",
            "Write a function that sorts a list.",
            "What is two plus two?",
            "Why is the sky blue?",
            "Can you write code?",
            "Explain how a computer works.",
            "Give me a recipe.",
            "Count to ten.",
        ),
        "You are welcome.": ("Thanks", "Thank you.", "thanks!", "Thank you very much."),
        "Goodbye.": ("Bye", "Goodbye", "See you.", "bye!"),
    }
)
"""Answers, and what they answer."""
