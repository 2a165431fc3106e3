"""An agent for tests: TURNS model calls; hangs with children on rows from HANG_FROM on; fails with FAIL=1.

Turns have MAX_TOKENS tokens at most, and as many more for each of the row's number modulo SPREAD. Before each model
call the row's number goes as a line into the FIFO TELL, where one is named.
"""

import http.client
import json
import os
import subprocess
import sys
import time
from urllib.parse import urlsplit


def main():
    with open(os.environ["RELAX_INPUT_JSON"], encoding="utf-8") as file:
        task = json.load(file)
    if os.environ.get("FAIL") == "1":
        print("Traceback: the agent's own bug")
        sys.exit(3)
    base = urlsplit(os.environ["RELAX_BASE_URL"])
    connection = http.client.HTTPConnection(base.hostname, base.port)
    headers = {"Authorization": "Bearer " + os.environ["RELAX_SESSION_ID"], "Content-Type": "application/json"}
    messages = task["messages"]
    most = int(os.environ.get("MAX_TOKENS", "8")) * (1 + task["metadata"]["row"] % int(os.environ.get("SPREAD", "1")))
    for turn in range(int(os.environ.get("TURNS", "1"))):
        if turn:
            messages.append({"role": "user", "content": "Go on."})
        if "TELL" in os.environ:
            with open(os.environ["TELL"], "w", encoding="ascii") as fifo:
                fifo.write(f"{task['metadata']['row']}\n")
        body = {"messages": messages, "max_completion_tokens": most}
        connection.request("POST", base.path + "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            sys.exit(f"{response.status}: {data.decode()}")
        messages.append(json.loads(data)["choices"][0]["message"])
    if task["metadata"]["row"] >= int(os.environ.get("HANG_FROM", "1000000")):
        tag = os.environ["TEST_TAG"]
        subprocess.Popen(["setsid", "bash", "-c", f"exec -a {tag}-child sleep 1000"])
        subprocess.Popen(["bash", "-c", f"trap '' TERM; exec -a {tag}-deaf sleep 1000"])
        time.sleep(1000)
    with open(os.environ["RELAX_OUTPUT_JSON"], "w", encoding="utf-8") as file:
        json.dump({"reward": len(data) % 7 / 7.0, "metadata": {"row": task["metadata"]["row"]}}, file)


main()
