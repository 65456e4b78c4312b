//! `offshoot check` for XFS: prints what the engine finds.

use std::io::Write;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_xfs::{XfsFinding, XfsFindingCode, XfsFindingPlace, XfsOptions, XfsReport, check_xfs};
use serde_json::{Value, json};

use crate::args::InfoArguments;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, Escaped, write_line};

pub(in crate::verbs) fn run(
    device: &Arc<dyn BlockDevice>,
    arguments: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let told = console.clone();
    let options = XfsOptions {
        is_log_ignored: arguments.volume.open.ignore_log,
        reporter: Some(Arc::new(move |report: &XfsReport| told.warning(report))),
        ..XfsOptions::default()
    };
    let result = check_xfs(device, &options)
        .map_err(|error| VerbFailure::Inside(device.name().into(), error))?;
    for finding in &result.findings {
        console.error(&Escaped(finding.to_string().as_bytes()));
        if arguments.json {
            write_line(out, &as_json(finding))?;
        }
    }
    let count = result.findings.len();
    if arguments.json {
        let log = result.log.name();
        let summary = json!({
            "findings": count, "are_more": result.are_more, "inodes": result.inodes, "log": log,
        });
        write_line(out, &summary)?;
    } else {
        let findings = match (count, result.are_more) {
            (0, _) => "nothing found".to_owned(),
            (_, true) => format!("more than {count} findings"),
            (_, false) => format!("findings: {count}"),
        };
        writeln!(out, "{} inodes checked, {findings}", result.inodes)?;
    }
    let is_read = |finding: &XfsFinding| finding.code != XfsFindingCode::NotRead;
    if result.findings.iter().any(is_read) {
        return Err(VerbFailure::Reported(ExitStatus::Corrupt));
    }
    if count > 0 { Err(VerbFailure::Reported(ExitStatus::Failed)) } else { Ok(()) }
}

fn as_json(finding: &XfsFinding) -> Value {
    let (mut group, mut block, mut inode) = (None, None, None);
    match finding.place {
        XfsFindingPlace::Group(of) => group = Some(of),
        XfsFindingPlace::Block { group: of, block: at } => (group, block) = (Some(of), Some(at)),
        XfsFindingPlace::Inode(ino) => inode = Some(ino),
        XfsFindingPlace::Volume => {}
    }
    json!({
        "code": finding.code.name(),
        "number": finding.code.number(),
        "group": group,
        "block": block,
        "inode": inode,
        "problem": finding.problem,
    })
}
