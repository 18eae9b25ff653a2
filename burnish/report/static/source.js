// Where the data come from: blocks inside the page (report.html), or the server that sent it (the live page). Both have the same answers
// under the same paths, which burnish/report/page_data.py lists.

async function inflate(letters) {
  const text = atob(letters), bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const parsed = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

class FrozenSource {
  constructor(elements) {
    this.isLive = false;
    this.blocksPerSearch = 1;
    this.elements = new Map([...elements].map((element) => [element.dataset.path, element]));
  }

  async bytes(path) {
    return inflate(this.elements.get(path).textContent);
  }

  async json(path) {
    return parsed(await this.bytes(path));
  }
}

// An answer of the server that is not the data: the status tells a run that is gone (404) from a table that changed (409).
class RefusedError extends Error {
  constructor(status, text) {
    super(text.trim() || "status " + status);
    this.status = status;
  }
}

class LiveSource {
  constructor() {
    this.isLive = true;
    this.blocksPerSearch = 64;
  }

  async bytes(path, options = {}) {
    const query = new URLSearchParams(options).toString(), place = path.split("/").map(encodeURIComponent).join("/");
    const response = await fetch("api/" + place + (query ? "?" + query : ""), { cache: "no-store" });
    if (!response.ok) throw new RefusedError(response.status, await response.text());
    return new Uint8Array(await response.arrayBuffer());
  }

  async json(path, options) {
    return parsed(await this.bytes(path, options));
  }
}

function findSource() {
  const elements = document.querySelectorAll("script[data-path]");
  return elements.length ? new FrozenSource(elements) : new LiveSource();
}
