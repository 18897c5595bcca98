// Keeps a page current: fetches it again and takes over the parts that changed (`data-live`).
import { draw, offerCopy } from "/static/figures.js";

const MAX_LINES = 1000; // of the log
const LOG_SLACK = 40; // pixels from its end within which it follows what is added

const { every, events } = document.body.dataset;
const held = new Map(); // what the server last said of each live part
for (const part of document.querySelectorAll("[data-live]")) held.set(part.id, part.innerHTML);

const status = document.getElementById("live");
function say(text) {
  if (!status || (status.textContent === text && !status.hidden)) return;
  status.hidden = false;
  status.textContent = text;
}

const drawn = new Map();
async function drawAll() {
  for (const place of document.querySelectorAll("[data-spec]")) {
    const text = document.getElementById(place.dataset.spec).textContent;
    if (drawn.get(place) === text) continue;
    drawn.set(place, text);
    const spec = JSON.parse(text);
    place.classList.toggle("empty", !spec);
    if (!spec) place.textContent = "Nothing has passed yet.";
    else if (!window.vegaEmbed) place.textContent = "Pictures need the service's vl-convert-python.";
    else await draw(place, spec);
  }
}

let asking; // what is under way; a newer request ends it
async function refresh(address = location.href) {
  asking?.abort();
  const mine = (asking = new AbortController());
  const started = performance.now();
  try {
    const answer = await fetch(address, { headers: { accept: "text/html" }, signal: mine.signal });
    if (new URL(answer.url).pathname === "/login") return location.reload();
    if (!answer.ok) throw new Error(`the service answers ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (mine !== asking) return;
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (!next || next.innerHTML === held.get(part.id)) continue;
      held.set(part.id, next.innerHTML);
      part.replaceChildren(...next.childNodes);
    }
    await drawAll();
  } catch (error) {
    if (error.name !== "AbortError") say(`not current: ${error.message}`);
    throw error;
  } finally {
    // A page that is dear to make is asked for less often.
    pause = Math.max(1000, 10 * (performance.now() - started));
  }
}
const quietly = () => refresh().catch(() => {});

// Jobs: what the stream of a job tells is the reason to fetch; a list of jobs looks by the clock,
// since a browser keeps few streams open.
let pause = 1000, planned, stream, timer, last = 0;
function plan() {
  planned ??= setTimeout(async () => { await quietly(); planned = undefined; }, pause);
}

const log = document.getElementById("log");
function tell(line) {
  if (line.id <= last) return; // a stream that is opened again tells all from the beginning
  last = line.id;
  if (!log) return;
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < LOG_SLACK;
  const item = document.createElement("li"), time = document.createElement("time");
  time.dateTime = line.at;
  time.textContent = line.at.slice(0, 19).replace("T", " ");
  // A shape is broken behind a comma, as everywhere on the pages.
  const shape = line.shape?.replaceAll(",", ",\u200b");
  item.append(time, shape ? `${line.op} ${shape}: ${line.text}` : line.text);
  log.append(item);
  while (log.children.length > MAX_LINES) log.firstChild.remove();
  if (follows) log.scrollTop = log.scrollHeight;
}

function listen() {
  stream = new EventSource(events);
  stream.addEventListener("open", () => say("live"));
  stream.addEventListener("log", (event) => tell(JSON.parse(event.data)));
  stream.addEventListener("state", plan);
  stream.addEventListener("end", (event) => {
    stop();
    ended = true;
    say(`ended: ${JSON.parse(event.data).state}`);
    quietly();
  });
  stream.addEventListener("error", () => {
    say("not current: the service does not answer; trying again");
    if (stream.readyState !== EventSource.CLOSED) return;
    stop();
    quietly(); // where the session has ended, this leads to the login
    timer = setTimeout(start, 5000); // it was refused, which a browser does not try again by itself
  });
}

async function look() {
  await refresh().then(() => say("live"), () => {});
  if (!document.hidden) timer = setTimeout(look, Math.max(1000 * every, pause));
}

let ended = false;
function start() {
  stop();
  if (events && !ended) listen();
  if (every) look();
}
function stop() {
  clearTimeout(timer);
  stream?.close();
}

// A page that nobody sees costs nothing, and holds no connection that another one needs.
document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
if (!document.hidden) start();

const search = document.querySelector("[data-search]");
let typing;
search?.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    const wanted = [...new FormData(search)].filter(([, value]) => value);
    const address = `${location.pathname}${wanted.length ? "?" : ""}${new URLSearchParams(wanted)}`;
    history.replaceState(null, "", address);
    quietly();
  }, 150);
});

for (const button of document.querySelectorAll("[data-copy]")) offerCopy(button);
await drawAll();
