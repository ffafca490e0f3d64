// Questions to the server, and the live overview.

/** Ask; throws an Error whose message can be shown. */
export async function ask(what, given = {}) {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  return answered(await fetch(`/api/${what}?${query}`, { headers: { accept: "application/json" } }));
}

export async function change(what, given) {
  return answered(await fetch(`/api/${what}`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-cues": "1" },
    body: JSON.stringify(given),
  }));
}

async function answered(response) {
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new Error(`The server answered ${response.status}.`);
  }
  if (response.status === 401) location.reload(); // the token has changed: the page asks for it
  if (!response.ok) throw new Error([answer.error, answer.try && `Try: ${answer.try}`].filter(Boolean).join(" "));
  return answer;
}

/** Call onOverview with each overview, and onState with "live", "waiting" or "lost". */
export function follow(onOverview, onState) {
  let source;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("/api/events");
    source.addEventListener("overview", (event) => {
      onState("live");
      onOverview(JSON.parse(event.data));
    });
    source.onerror = () => {
      onState("lost");
      if (source && source.readyState === EventSource.CLOSED) { // refused: ask again, a little later
        source = undefined;
        setTimeout(open, 3000);
      }
    };
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) open();
    else if (source) { // a page that nobody sees costs nothing
      source.close();
      source = undefined;
    }
  });
  open();
}
