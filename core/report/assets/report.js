// The page of one report.

const page = { view: timeView() };
page.report = drawReport(JSON.parse(document.getElementById("data").textContent), document.body, page.view);
