// Forms that change something: sent to the service's API with the token that the form holds.

/** POST JSON; what the service answers, or an error with its words. */
async function post(address, body, token) {
  const headers = { "content-type": "application/json" };
  if (token) headers.authorization = `Bearer ${token}`;
  const answer = await fetch(address, { method: "POST", headers, body: JSON.stringify(body) });
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(told.error ?? `the service answers ${answer.status}`);
  return told;
}

/** Let a form do `act` with its fields; what goes wrong is said in the form. */
function handle(form, act) {
  const fault = form?.querySelector(".fault"), button = form?.querySelector("button");
  // Without this script the form sends nothing: a token must not get into an address.
  if (button) button.disabled = false;
  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    fault.hidden = true;
    button.disabled = true;
    try {
      await act(new FormData(form));
    } catch (error) {
      fault.textContent = error.message;
      fault.hidden = false;
    } finally {
      button.disabled = false;
    }
  });
}

handle(document.getElementById("new-job"), async (fields) => {
  const problems = fields.get("problems").split("\n").map((line) => line.trim()).filter(Boolean);
  const body = { problems, op: fields.get("op"), effort: fields.get("effort"),
    priority: Number(fields.get("priority")) };
  const job = await post("/v1/jobs", body, fields.get("token"));
  location.assign(`/jobs/${job.id}`);
});

const cancel = document.getElementById("cancel-job");
handle(cancel, async (fields) => {
  await post(`/v1/jobs/${cancel.dataset.job}/cancel`, {}, fields.get("token"));
  location.reload();
});
