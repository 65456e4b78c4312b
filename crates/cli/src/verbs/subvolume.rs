//! `offshoot subvolume`: subvolumes and snapshots.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::SubvolumeInfo;
use serde::Serialize;

use crate::args::InfoArguments;
use crate::exit::Result;
use crate::output::{CivilTime, Console, Escaped, JsonArray, json_name, json_time};
use crate::session::Session;

#[derive(Serialize)]
struct Json {
    id: u64,
    parent: Option<u64>,
    path: String,
    generation: u64,
    created_generation: u64,
    created: String,
    read_only: bool,
    is_default: bool,
    uuid: Option<String>,
    parent_uuid: Option<String>,
    received_uuid: Option<String>,
}

impl Json {
    fn new(info: &SubvolumeInfo, is_default: bool) -> Self {
        let text = |uuid: Option<uuid::Uuid>| uuid.map(|uuid| uuid.to_string());
        Self {
            id: info.id.0,
            parent: info.parent.map(|parent| parent.0),
            path: json_name(&info.path),
            generation: info.generation.0,
            created_generation: info.created_generation.0,
            created: json_time(info.created),
            read_only: info.read_only,
            is_default,
            uuid: text(info.uuid),
            parent_uuid: text(info.parent_uuid),
            received_uuid: text(info.received_uuid),
        }
    }
}

pub(super) fn list(
    arguments: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let session = Session::open(&arguments.volume, console)?;
    let default = session.volume.default_subvolume()?;
    let subvolumes = session.volume.subvolumes();
    if arguments.json {
        let mut array = JsonArray::new(out)?;
        for info in subvolumes {
            let info = info?;
            array.push(&Json::new(&info, info.id == default))?;
        }
        return Ok(array.finish()?);
    }
    writeln!(
        out,
        "{:>6} {:>6} {:>10}  {:16}  {:9}  PATH",
        "ID", "PARENT", "GENERATION", "CREATED", "FLAGS"
    )?;
    for info in subvolumes {
        let info = info?;
        let parent = info.parent.map_or("-".to_owned(), |parent| parent.to_string());
        let mut flags = Vec::new();
        flags.extend(info.read_only.then_some("ro"));
        flags.extend(info.parent_uuid.map(|_| "snap"));
        flags.extend((info.id == default).then_some("default"));
        let flags = if flags.is_empty() { "-".to_owned() } else { flags.join(",") };
        writeln!(
            out,
            "{:>6} {parent:>6} {:>10}  {:#}  {flags:9}  /{}",
            info.id.0,
            info.generation.0,
            CivilTime(info.created),
            Escaped(&info.path)
        )?;
    }
    Ok(())
}
