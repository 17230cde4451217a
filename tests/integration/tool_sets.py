"""Tool sets for conversations, from one flat function to several nested ones, with enums, arrays, optional members,
numbers in ranges, patterns, references and alternatives.

Strings and arrays have an upper length, so that a small model's call ends within a few hundred tokens.
"""

from typing import Any, NamedTuple

Schema = dict[str, Any]


class Function(NamedTuple):
    """A function that may be called."""

    name: str
    description: str
    parameters: Schema


class Demand(NamedTuple):
    """What the user says, and the call that the request demands."""

    question: str
    name: str | None
    """Function that must be called; None: any, but one at least."""


class ToolSet(NamedTuple):
    """Functions, and a conversation about them: a call, its result, an answer, another call."""

    name: str
    functions: tuple[Function, ...]
    first: Demand
    result: str
    """What each call of the first turn returns."""
    other_result: str
    """A longer result of the same calls, which another answer must follow."""
    second: Demand
    is_parallel: bool = False
    """Whether an answer may have several calls."""

    def schema(self, function: str) -> Schema:
        """The parameters of that function. Raises KeyError."""
        return {each.name: each.parameters for each in self.functions}[function]


def _object(properties: dict[str, Schema], *, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def _text(length: int = 16) -> Schema:
    return {"type": "string", "maxLength": length}


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _array(items: Schema, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


_DAY = _enum("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TIME: Schema = {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}
_DATE: Schema = {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"}

WEATHER = Function("get_weather", "The weather in a city now", _object({"city": _text()}))
FORECAST = Function(
    "get_forecast", "The weather of the next days", _object({"city": _text(), "days": _whole(1, 7)}, optional=("days",))
)
CLOCK = Function("now", "The time now", _object({}))
TABLE = Function(
    "book_table",
    "Book a table in a restaurant",
    _object(
        {
            "restaurant": _text(),
            "guests": _whole(1, 12),
            "outside": {"type": "boolean"},
            "when": _object({"day": _DAY, "time": _TIME}),
        },
        optional=("outside",),
    ),
)
CANCEL = Function("cancel_booking", "Cancel a booking", _object({"number": _whole(1, 9999)}))
CONVERT = Function(
    "convert_money",
    "Convert an amount of money",
    _object(
        {
            "amount": {"type": "number", "minimum": 0, "maximum": 100000},
            "source": _enum("EUR", "USD", "CHF", "JPY"),
            "target": _enum("EUR", "USD", "CHF", "JPY"),
        }
    ),
)
MAIL = Function(
    "send_mail",
    "Send a mail",
    _object({"to": _array(_text()), "subject": _text(24), "urgent": {"type": "boolean"}}, optional=("urgent",)),
)
ORDER = Function(
    "order_food",
    "Order food",
    _object(
        {
            "items": _array(_object({"dish": _text(), "count": _whole(1, 9), "size": _enum("small", "large")})),
            "address": _object(
                {"street": _text(), "number": _whole(1, 300), "floor": _whole(0, 20)}, optional=("floor",)
            ),
        }
    ),
)
SEARCH = Function(
    "search_flights",
    "Search for flights",
    _object(
        {
            "legs": _array(
                _object({"from": {"$ref": "#/$defs/airport"}, "to": {"$ref": "#/$defs/airport"}, "date": _DATE}), 2
            ),
            "seats": _enum("economy", "business"),
        },
        **{"$defs": {"airport": {"type": "string", "pattern": "^[A-Z]{3}$"}}},
    ),
)
MOVE = Function(
    "move_robot",
    "Move a robot by a number of steps, or to a place",
    _object(
        {
            "goal": {
                "anyOf": [
                    _object({"steps": _whole(-50, 50)}),
                    _object({"x": _whole(0, 99), "y": _whole(0, 99)}),
                ]
            },
            "speed": _enum("slow", "fast"),
        }
    ),
)
LIGHT = Function(
    "set_light", "Switch a light", _object({"room": _enum("kitchen", "bath", "hall"), "on": {"type": "boolean"}})
)
HEATING = Function(
    "set_heating",
    "Set the temperature of a room in degrees",
    _object({"room": _enum("kitchen", "bath", "hall"), "degrees": _whole(5, 30)}),
)
PLAN = Function(
    "make_plan",
    "Plan a project",
    _object(
        {
            "title": _text(),
            "phases": _array(
                _object(
                    {
                        "name": _text(),
                        "weeks": _whole(1, 20),
                        "tasks": _array(_object({"what": _text(), "who": _text(10)}), 2),
                    }
                ),
                2,
            ),
        }
    ),
)
MATRIX = Function(
    "add_rows",
    "Add rows of numbers to a table",
    _object({"rows": _array(_array(_whole(-99, 99), 3), 3), "label": {"const": "data"}}),
)
PATIENT = Function(
    "note_patient",
    "Note what a patient reports",
    _object(
        {
            "age": _whole(0, 120),
            "pain": {"type": ["integer", "null"], "minimum": 0, "maximum": 10},
            "since": _DATE,
            "symptoms": _array(_enum("cough", "fever", "headache", "rash")),
        },
        optional=("pain",),
    ),
)

TOOL_SETS = (
    ToolSet(
        "flat",
        (WEATHER,),
        Demand("What is the weather in Rome?", None),
        "25 degrees and sun",
        "4 degrees, and a storm with a lot of snow",
        Demand("And in Bern?", None),
    ),
    ToolSet(
        "no parameters",
        (CLOCK,),
        Demand("What time is it?", "now"),
        "It is 18:30 in the evening",
        "It is 07:15 in the morning, and the day is Sunday",
        Demand("And now?", None),
    ),
    ToolSet(
        "optional member",
        (FORECAST,),
        Demand("Will it rain in Oslo this week?", "get_forecast"),
        "Rain on Tuesday",
        "Sun from Monday to Friday, rain at the weekend",
        Demand("And in Lima?", "get_forecast"),
    ),
    ToolSet(
        "enums",
        (CONVERT,),
        Demand("How many dollars are 40 euros?", None),
        "43.60 dollars",
        "There was an error: the rates of today are not known",
        Demand("And how many francs?", None),
    ),
    ToolSet(
        "array of texts",
        (MAIL,),
        Demand("Write to Ann and Bob that the meeting is at noon.", "send_mail"),
        "The mail was sent to 2 people",
        "The mail was not sent, because the server refused the address of Bob",
        Demand("Write the same to Carl.", "send_mail"),
    ),
    ToolSet(
        "nested object",
        (TABLE,),
        Demand("A table for four on Friday at eight, please.", None),
        "Booked, the number is 4711",
        "There is no table on Friday at all; Saturday at 19:00 has one, number 52",
        Demand("And one for two people on Sunday.", None),
    ),
    ToolSet(
        "array of objects",
        (ORDER,),
        Demand("Two large pizzas and a salad to Mill Street 7.", "order_food"),
        "The order costs 31 euros",
        "The restaurant is closed today, and opens again tomorrow at noon",
        Demand("Then one small soup.", "order_food"),
    ),
    ToolSet(
        "references and patterns",
        (SEARCH,),
        Demand("A flight from Zurich to Rome and back in May.", None),
        "One flight, for 120 euros",
        "No flights were found, because of a strike of all pilots",
        Demand("And from Rome to Lima?", None),
    ),
    ToolSet(
        "alternatives",
        (MOVE,),
        Demand("Go ten steps back.", "move_robot"),
        "The robot is at 12, 40",
        "The robot has fallen over on its way, and can not move any more until it is repaired",
        Demand("Now go to the corner.", "move_robot"),
    ),
    ToolSet(
        "three levels",
        (PLAN,),
        Demand("Plan the move of our office.", None),
        "The plan takes 9 weeks",
        "The plan was refused: it needs more people than there are",
        Demand("Make a shorter one.", "make_plan"),
    ),
    ToolSet(
        "arrays of arrays",
        (MATRIX, CLOCK),
        Demand("Add the rows 1, 2, 3 and 4, 5, 6.", "add_rows"),
        "The table has 2 rows, the sum is 21",
        "The table is full, and none of the rows was added to it",
        Demand("Add one row of zeros.", "add_rows"),
    ),
    ToolSet(
        "one of three",
        (WEATHER, TABLE, CLOCK),
        Demand("What is the weather in Paris?", None),
        "18 degrees and clouds",
        "The weather service does not answer; try again in an hour",
        Demand("Then book a table inside.", "book_table"),
    ),
    ToolSet(
        "null and enums",
        (PATIENT, CANCEL),
        Demand("I have had a cough and fever since Monday.", "note_patient"),
        "Noted; the doctor calls at 10:00",
        "Nothing was noted, because the patient is not known here; please send name and address first",
        Demand("Cancel my booking 17.", "cancel_booking"),
    ),
    ToolSet(
        "parallel, any",
        (LIGHT, HEATING),
        Demand("Switch the light on in the kitchen and in the hall, and heat the bath to 22 degrees.", None),
        "Done",
        "Failed: there is no electric power in the whole house",
        Demand("Now switch everything off.", None),
        is_parallel=True,
    ),
    ToolSet(
        "parallel, of four",
        (WEATHER, CLOCK, CONVERT, CANCEL),
        Demand("The weather in Rome and in Bern, and the time, please.", None),
        "12 degrees at noon",
        "Not known, the service is closed until tomorrow morning",
        Demand("And how many euros are 10 dollars?", "convert_money"),
        is_parallel=True,
    ),
)
