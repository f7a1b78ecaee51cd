// Questions to the server, which answers in lines of JSON.

const CUT_OFF = "The server's answer was cut off: ask again, or start panpipe explore again.";
const REFUSED = "refused";
const failure = (error) => (error.message === CUT_OFF ? CUT_OFF
  : `The server ${error.cause === REFUSED ? "was started again" : "does not answer"}: ${error.message}`);

// Without a server answers are files, for the questions of a grid.
function answerFile(path, question) {
  const { schedule, devices, microbatches } = complete(question);
  return `answers/${path === "api/points" ? "points" : schedule}-${devices}-${microbatches}.jsonl`;
}

async function ask(path, body, signal) {
  if (CHOICES.grid) return fetch(answerFile(path, body.question), { signal });
  const response = await fetch(path, { method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", "X-Panpipe-Token": CHOICES.token } });
  if (response.headers.get("Content-Type")?.startsWith("text/plain")) throw new Error(await response.text(), { cause: REFUSED });
  return response;
}

// Calls ``each`` with every line of the answer but its last, which marks the end. Aborting the signal cancels the work.
async function askLines(path, body, signal, each) {
  const response = await ask(path, body, signal);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines.map((text) => JSON.parse(text))) {
      if (line.end) ended = true;
      else each(line);
    }
    if (done) break;
  }
  if (!ended) throw new Error(CUT_OFF);
}

async function save(body) {
  const response = await ask("api/export", body);
  if (!response.ok) throw new Error((await response.json()).error);
  const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition"))[1];
  const link = element("a", { href: URL.createObjectURL(await response.blob()), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
