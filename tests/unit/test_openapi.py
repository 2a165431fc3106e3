"""The OpenAPI document against the application that it describes."""

from __future__ import annotations

import json
import re

from builders_api import OPERATOR, FakeDirectory

from relax_trio.api.app import make_views
from relax_trio.api.front import ModelRequests
from relax_trio.api.openapi import openapi_document
from relax_trio.api.paths import BASE_PATH
from relax_trio.sync.cpu import InlineCpuPool

DOCUMENT = openapi_document()
METHODS = {"get", "post"}


def served() -> set[tuple[str, str]]:
    """Method and path of every route, `/v1` in front where the path has it, in the document's spelling."""
    views = make_views(FakeDirectory({}), operator_token=OPERATOR, cpu=InlineCpuPool())
    requests = ModelRequests(
        FakeDirectory({}), max_bytes=1, cpu=InlineCpuPool(), template_variables=frozenset(), others=views
    )
    found = {
        (method.lower(), re.sub(r"<\w+:(\w+)>", r"{\1}", rule.rule.removeprefix(BASE_PATH)))
        for rule in views.url_map.iter_rules()
        for method in rule.methods or ()
        if method.lower() in METHODS
    } | {("post", path.removeprefix(BASE_PATH)) for path in requests.paths}
    return {(method, path) for method, path in found if (method, f"/v1{path}") not in found}


def test_the_document_names_every_path_that_is_served_and_no_other():
    named = {(method, path) for path, item in DOCUMENT["paths"].items() for method in item if method in METHODS}

    assert named == served() - {("post", "/v1/completions")}


def test_every_shape_that_is_referred_to_is_there_and_no_other():
    referred = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(DOCUMENT)))

    assert referred == set(DOCUMENT["components"]["schemas"])
