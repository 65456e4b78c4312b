//! `offshoot subvolume show`, `get` and `get-default`.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::{Engine, SubvolumeInfo};
use offshoot_btrfs_format::Generation;
use offshoot_vfs::{Error, Timestamp};
use serde::Serialize;

use super::{Json, flags, subvolume_at};
use crate::args::{InfoArguments, SubvolumeArguments};
use crate::exit::Result;
use crate::output::{CivilTime, Console, Escaped, json_name, write_line};
use crate::session::{PlaceSession, Session, THIS_VERB};

#[derive(Serialize)]
struct ShownSubvolume {
    #[serde(flatten)]
    info: Json,
    sent_generation: Option<u64>,
    sent: Option<String>,
    received_generation: Option<u64>,
    received: Option<String>,
    snapshots: Vec<String>,
}

pub(in crate::verbs) fn show(
    arguments: &SubvolumeArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let session = PlaceSession::open(&arguments.place, console)?;
    let fs = session.fs.btrfs(THIS_VERB)?;
    let volume = fs.volume();
    let mut info = volume.subvolume(subvolume_at(fs, &session.path)?)?;
    let is_default = volume.default_subvolume()? == info.id;
    let snapshots = snapshots_of(volume, &info)?;
    if arguments.json {
        let [sent, received] = [info.sent, info.received].map(Option::unzip);
        let time = |(generation, time): (Option<Generation>, Option<Timestamp>)| {
            (generation.map(|generation| generation.0), time.map(Timestamp::decimal))
        };
        let ((sent_generation, sent), (received_generation, received)) =
            (time(sent), time(received));
        let shown = ShownSubvolume {
            info: Json::new(&info, is_default),
            sent_generation,
            sent,
            received_generation,
            received,
            snapshots: snapshots.iter().map(|path| json_name(path)).collect(),
        };
        return Ok(write_line(out, &shown)?);
    }
    let path = std::mem::replace(&mut info.path, Ok(Vec::new()))?;
    writeln!(out, "/{}", Escaped(&path))?;
    let uuid = |uuid: Option<uuid::Uuid>| uuid.map_or("-".to_owned(), |uuid| uuid.to_string());
    let moment = |moment: Option<(Generation, Timestamp)>| match moment {
        Some((generation, time)) => format!("generation {generation}, {}", CivilTime(time)),
        None => "-".to_owned(),
    };
    let parent = info.parent.map_or("-".to_owned(), |parent| parent.to_string());
    for (name, value) in [
        ("ID", info.id.to_string()),
        ("Parent ID", parent),
        ("UUID", uuid(info.uuid)),
        ("Snapshot of", uuid(info.parent_uuid)),
        ("Received from", uuid(info.received_uuid)),
        ("Generation", info.generation.to_string()),
        ("Created", moment(Some((info.created_generation, info.created)))),
        ("Sent", moment(info.sent)),
        ("Received", moment(info.received)),
        ("Flags", flags(&info, is_default)),
    ] {
        writeln!(out, "{name:>14}: {value}")?;
    }
    for path in &snapshots {
        writeln!(out, "{:>14}: /{}", "Snapshot", Escaped(path))?;
    }
    Ok(())
}

/// The paths of the snapshots of a subvolume. Snapshots whose path cannot be read are left out.
fn snapshots_of(volume: &Engine, info: &SubvolumeInfo) -> Result<Vec<Vec<u8>>, Error> {
    let mut paths = Vec::new();
    for other in volume.subvolumes() {
        let other = other?;
        if info.uuid.is_some() && other.parent_uuid == info.uuid {
            paths.extend(other.path.ok());
        }
    }
    Ok(paths)
}

pub(in crate::verbs) fn get_default(
    arguments: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let session = Session::open(&arguments.volume, console)?;
    let info = session.volume.subvolume(session.volume.default_subvolume()?)?;
    if arguments.json {
        return Ok(write_line(out, &Json::new(&info, true))?);
    }
    Ok(writeln!(out, "{} /{}", info.id, Escaped(&info.path?))?)
}

pub(in crate::verbs) fn get(
    arguments: &SubvolumeArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    #[derive(Serialize)]
    struct Properties {
        ro: bool,
    }
    let session = PlaceSession::open(&arguments.place, console)?;
    let fs = session.fs.btrfs(THIS_VERB)?;
    let ro = fs.volume().subvolume(subvolume_at(fs, &session.path)?)?.is_read_only;
    if arguments.json {
        return Ok(write_line(out, &Properties { ro })?);
    }
    Ok(writeln!(out, "ro={ro}")?)
}
