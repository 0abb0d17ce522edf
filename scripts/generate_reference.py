"""Write docs/reference/ from the code: command line, config document, Python API.

    python scripts/generate_reference.py           # write
    python scripts/generate_reference.py --check   # exit 1 if a page is not up to date

A test runs the check, so the pages are also the snapshot of the interfaces.
"""

import argparse
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo

import patternsearch
from patternsearch.cli.app import app
from patternsearch.schema.json_schema import config_json_schema

TARGET = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/generate_reference.py: change the code, not this page. -->"


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = TARGET / name
        if check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python scripts/generate_reference.py")
    return 1 if stale else 0


def pages() -> dict[str, str]:
    """Return every page's text by file name."""
    return {
        "cli.md": _page(_command_line()),
        "config.md": _page(_config()),
        "python.md": _page(_python()),
    }


def _page(lines: Iterator[str]) -> str:
    return "\n".join([NOTE, "", *lines]).rstrip() + "\n"


# --- command line ----------------------------------------------------------------------------


def _command_line() -> Iterator[str]:
    yield "# Command line"
    yield ""
    yield "`patternsearch` alone shows the order in which the commands are used. Every command"
    yield "takes `--help`; those that print a result take `--json` and then write one document to"
    yield "stdout. Talk, progress and errors go to stderr. `NO_COLOR` turns colours off, and"
    yield "`patternsearch --install-completion` sets up completion for the shell."
    yield ""
    yield "| exit code | meaning |"
    yield "|---|---|"
    yield "| 0 | done, or nothing to object to |"
    yield "| 1 | the check says no: `validate` found faults, `diff` found differences |"
    yield "| 2 | usage or bad input; the message names the value, the rule and the way out |"
    yield "| 3 | the environment lacks something: a GPU, a package, the network |"
    for name, function in sorted(_commands(app)):
        yield from _command(name, function)


def _commands(group: typer.Typer, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for command in group.registered_commands:
        yield prefix + (command.name or command.callback.__name__), command.callback
    for inner in group.registered_groups:
        yield from _commands(inner.typer_instance, f"{prefix}{inner.name} ")


def _command(name: str, function: Any) -> Iterator[str]:
    body, _, rest = (inspect.getdoc(function) or "").partition("Example:")
    example, _, more = rest.strip().partition("\n\n")
    yield ""
    yield f"## {name}"
    yield ""
    yield from body.strip().splitlines()
    if example:
        yield ""
        yield "```"
        yield from (line.strip() for line in example.splitlines())
        yield "```"
    if more:
        yield ""
        yield from more.splitlines()
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    rows = [_row(parameter, hints[parameter.name]) for parameter in parameters]
    if rows:
        yield ""
        yield "| argument or option | values | |"
        yield "|---|---|---|"
        yield from rows


def _row(parameter: inspect.Parameter, hint: Any) -> str:
    kind, info = typing.get_args(hint)[:2]
    assert isinstance(info, OptionInfo | ArgumentInfo), parameter
    options = [type_ for type_ in typing.get_args(kind) if type_ is not type(None)]
    if options and typing.get_origin(kind) is not typing.Literal:
        kind = options[0]
    # Inside Annotated the first declaration stands in the place of the default.
    decls = [decl for decl in (info.default, *(info.param_decls or ())) if isinstance(decl, str)]
    names = [name for decl in decls for name in decl.split("/")]
    if isinstance(info, ArgumentInfo):
        names = [info.metavar or parameter.name.upper()]
    elif not names:
        names = ["--" + parameter.name.replace("_", "-")]
        names += [names[0].replace("--", "--no-")] if kind is bool else []
    shown = ", ".join(f"`{name}`" for name in sorted(names, key=len, reverse=True))
    return f"| {shown} | {_values(kind, info)} | {_help(parameter, info, names, kind)} |"


def _values(kind: Any, info: Any) -> str:
    if kind is bool:
        return "flag"
    if typing.get_origin(kind) is typing.Literal:
        return " \\| ".join(typing.get_args(kind))
    if info.metavar and isinstance(info, OptionInfo):
        return info.metavar
    low = getattr(info, "min", None)
    return kind.__name__.lower() + (f" ≥ {low}" if low is not None else "")


def _help(parameter: inspect.Parameter, info: Any, names: list[str], kind: Any) -> str:
    text = " ".join((info.help or "").split()).replace("|", "\\|")
    default = parameter.default
    if default is inspect.Parameter.empty:
        return f"{text} *Required.*"
    if default is None or (kind is bool and len(names) == 1):
        return text
    if kind is bool:
        return f"{text} Default `{names[0] if default else names[1]}`."
    return f"{text} Default `{default}`."


# --- config ----------------------------------------------------------------------------------


def _config() -> Iterator[str]:
    schema = config_json_schema()
    yield "# The config document"
    yield ""
    yield "One YAML or JSON document. Reading is strict: an unknown key, a missing key or a value"
    yield "out of range is an error that names its place. Writing is canonical: loading and dumping"
    yield "a config gives the same bytes. `patternsearch schema` prints the JSON Schema that this"
    yield "page is made from."
    definitions = schema["$defs"]
    yield from _model("PatternConfig", schema)
    for name in sorted(definitions, key=lambda n: _first_use(n, schema)):
        yield from _model(name, definitions[name])


def _first_use(name: str, schema: dict[str, Any]) -> int:
    return json.dumps(schema["properties"]).find(f'"#/$defs/{name}"') % 10**9


def _model(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"## {name}"
    yield ""
    yield " ".join(schema.get("description", "").replace("``", "`").split())
    yield ""
    yield "| key | type | meaning |"
    yield "|---|---|---|"
    required = set(schema.get("required", ()))
    for key, value in schema.get("properties", {}).items():
        meaning = value.get("description", "")
        if key not in required and "default" in value:
            default = json.dumps(value["default"])
            meaning = f"{meaning} Default `{default}`.".strip()
        yield f"| `{key}` | {_type(value)} | {meaning} |"


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf"):
        if union in value:
            return " or ".join(_type(part) for part in value[union])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return " or ".join(f"`{json.dumps(item)}`" for item in value["enum"])
    kind = value.get("type", "any")
    if kind == "array":
        if "prefixItems" in value:
            return "[" + ", ".join(_type(item) for item in value["prefixItems"]) + "]"
        return f"list of {_type(value.get('items', {}))}"
    low, high = value.get("minimum"), value.get("maximum")
    if low is not None and high is not None:
        return f"{kind} {low:g} to {high:g}"
    if low is not None:
        return f"{kind} ≥ {low:g}"
    if "pattern" in value:
        return f"{kind} `{value['pattern']}`"
    return str(kind)


# --- Python ----------------------------------------------------------------------------------


def _python() -> Iterator[str]:
    yield "# Python API"
    yield ""
    yield "`import patternsearch` loads neither torch nor transformers; a name is loaded when it is"
    yield "first used. Everything here is typed (`py.typed`). Names that are not on this page may"
    yield "change without notice."
    names = [name for name in patternsearch.__all__ if name != "__version__"]
    functions = [name for name in names if not inspect.isclass(getattr(patternsearch, name))]
    for name in functions + [name for name in names if name not in functions]:
        yield from _entry(name, getattr(patternsearch, name))


def _entry(name: str, value: Any) -> Iterator[str]:
    yield ""
    yield f"## {name}"
    yield ""
    yield "```python"
    yield from _signature(name, value)
    yield "```"
    yield ""
    yield from _docstring(inspect.getdoc(value) or "")


def _signature(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value) and (issubclass(value, Exception) or hasattr(value, "model_fields")):
        yield f"class {name}({value.__bases__[0].__name__})"
        return
    signature = inspect.signature(value)
    parameters = list(signature.parameters.values())
    yield f"{name}("
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "    *,"
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        yield f"    {parameter.name}: {_annotation(parameter.annotation)}{default},"
    returned = "" if inspect.isclass(value) else f" -> {_annotation(signature.return_annotation)}"
    yield f"){returned}"


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else _type_name(annotation)
    text = re.sub(r"\b(?:[a-z_]+\.)+([A-Z])", r"\1", text)
    return text.replace("NoneType", "None")


def _type_name(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return "Any"
    inner = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type_name(part) for part in inner))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if inspect.isclass(annotation) and not inner:
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def _value(value: Any) -> str:
    return repr(value)


def _docstring(text: str) -> Iterator[str]:
    """Turn a Google docstring into Markdown: sections in bold, entries as a list."""
    section = has_entries = False
    text = re.sub(r":(?:func|class|mod|data|attr):`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    for line in text.splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line)
        if heading:
            section = True
            has_entries = heading[1] not in ("Returns", "Yields")
            yield f"**{heading[1]}**"
            yield ""
        elif section and line.strip():
            entry = re.fullmatch(r"    (\S[^:]*): (.*)", line)
            if has_entries:
                yield f"- `{entry[1]}`: {entry[2]}" if entry else "  " + line.strip()
            else:
                yield line.strip()
        else:
            section = section and bool(line.strip())
            yield line


if __name__ == "__main__":
    sys.exit(main())
