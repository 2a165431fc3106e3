"""Start of a warm parent: `PYTHON …/warm_main.py FILE|-m MODULE ARGS`, with its control socket as descriptor 3.

The arguments are shown in process lists and nothing else: its forks run what they are ordered to. They go on at the
end of this file as if PYTHON had just been started with their own arguments.
"""

import sys

if __name__ == "__main__":
    if sys.version_info < (3, 9):  # noqa: UP036 - the agent's Python, not the engine's
        sys.exit("a warm parent needs Python 3.9 or newer")
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this directory, whose names would hide others

    import importlib.util
    import os

    def load_warden() -> None:
        """Make the warden's package importable without a change of the search path."""
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = importlib.util.spec_from_file_location(
            "relax_trio", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )
        assert spec is not None, "the file is a Python module"
        assert spec.loader is not None, "and can be loaded"
        sys.modules["relax_trio"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["relax_trio"])

    load_warden()
    from relax_trio.warden.fork import run_as_main
    from relax_trio.warden.warm import serve

    for name in [name for name in sys.modules if name.partition(".")[0] == "relax_trio"]:
        del sys.modules[name]  # the agent may have a package of this name of its own
    run_as_main(*serve())
