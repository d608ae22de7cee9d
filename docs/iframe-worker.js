// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Browsers start no worker in a page that is opened as a file, and the theme's search is one: here its script runs in a
// hidden frame of the page. The name of the class is the one that the script looks for, to load its own scripts.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each);
      };
      this.loaded = this.load(url);
    }

    load(url) {
      const script = this.scope.document.createElement("script");
      script.src = new URL(url, this.scope.document.baseURI);
      return new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${script.src} cannot be loaded`));
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
