//! Builds volumes from a source tree: from a directory, from an archive, from a container image.
//!
//! | side | what it does |
//! |---|---|
//! | ours | `offshoot build` |
//! | mkfs.btrfs | `mkfs.btrfs --rootdir`; of an archive, `tar` unpacks it first |
//! | kernel | the kernel mounts a new volume, and `cp -a` or `tar` fills it |
//! | podman | the kernel mounts a new volume, and `podman` loads the image with its driver for btrfs; where there is `podman` |
//!
//! Each is run plain and with zstd:3. A `mkfs.btrfs` that does not compress runs without, and its
//! name in the table says so. Every volume is mounted after its run, and must hold as many files as
//! the others.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::{command, run as run_program, try_run};

use crate::extract::{clear, entries};
use crate::measure::run;
use crate::table::{self, SideRuns};
use crate::{Result, SourceBenchOptions};

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    SourceBenchOptions::parse(args).map(|options| all(&options))
}

/// What is built from. The first run makes it, and later ones find it.
struct BuildInputs {
    /// A directory.
    tree: PathBuf,
    /// An archive of it, not packed.
    archive: PathBuf,
    /// A container image of it, in a directory in the layout of OCI.
    image: PathBuf,
}

/// Unpacks an archive, or copies a directory: "$1" to "$2".
const TREE: &str = r#"
set -eu
mkdir -p "$2.unfinished"
if [ -d "$1" ]; then cp -a "$1/." "$2.unfinished"; else tar -xf "$1" -C "$2.unfinished"; fi
mv "$2.unfinished" "$2"
"#;

const ARCHIVE: &str = r#"
set -eu
tar -C "$1" -cf "$2.unfinished" .
mv "$2.unfinished" "$2"
"#;

/// Packs "$1" as an image of four layers in "$2": three thirds of the names in its largest
/// directory, or in itself, with what lies beside them in the first, and once more the last third.
const IMAGE: &str = r#"
set -eu
tree=$1 out=$2.unfinished
rm -rf "$out"
mkdir -p "$out/blobs/sha256"
digest() { sha256sum "$1" | cut -d' ' -f1; }
blob() { name=$(digest "$1"); mv "$1" "$out/blobs/sha256/$name"; }
cd "$tree"
top=.
while [ "$(ls -A "$top" | wc -l)" = 1 ] && [ -d "$top/$(ls -A "$top")" ]; do top=$top/$(ls -A "$top"); done
ls -A "$top" | sed "s|^|$top/|" > "$out/names"
third=$(( ($(wc -l < "$out/names") + 2) / 3 ))
layers= diffs=
for number in 1 2 3 3; do
    sed -n "$(( (number - 1) * third + 1 )),$(( number * third ))p" "$out/names" > "$out/part"
    tar -cf "$out/layer" -T "$out/part"
    diffs="$diffs,\"sha256:$(digest "$out/layer")\""
    gzip -1 -n -f "$out/layer"
    size=$(stat -c %s "$out/layer.gz")
    blob "$out/layer.gz"
    layers="$layers,{\"mediaType\":\"application/vnd.oci.image.layer.v1.tar+gzip\",\"digest\":\"sha256:$name\",\"size\":$size}"
done
case $(uname -m) in x86_64) machine=amd64 ;; aarch64) machine=arm64 ;; *) machine=$(uname -m) ;; esac
printf '{"architecture":"%s","os":"linux","rootfs":{"type":"layers","diff_ids":[%s]}}' "$machine" "${diffs#,}" > "$out/config"
size=$(stat -c %s "$out/config")
blob "$out/config"
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:%s","size":%s},"layers":[%s]}' "$name" "$size" "${layers#,}" > "$out/manifest"
size=$(stat -c %s "$out/manifest")
blob "$out/manifest"
printf '{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:%s","size":%s}]}' "$name" "$size" > "$out/index.json"
printf '{"imageLayoutVersion":"1.0.0"}' > "$out/oci-layout"
rm -f "$out/names" "$out/part"
mv "$out" "$2"
"#;

impl BuildInputs {
    fn prepare(options: &SourceBenchOptions) -> Result<Self> {
        let path = |name: &str| options.dir.join(name);
        let inputs = Self { tree: path("tree"), archive: path("tree.tar"), image: path("image") };
        let made = |script: &str, from: &Path, to: &Path| {
            if to.exists() {
                return Ok(());
            }
            eprintln!("making {}", to.display());
            if !from.exists() {
                return Err(format!(
                    "{} is not there: `apt-get install linux-source-6.1` brings the default source",
                    from.display()
                ));
            }
            let words = ["-c".as_ref(), script.as_ref(), "sh".as_ref()];
            try_run("sh", &[&words[..], &[from.as_os_str(), to.as_os_str()]].concat()).map(drop)
        };
        made(TREE, &options.source, &inputs.tree)?;
        made(ARCHIVE, &inputs.tree, &inputs.archive)?;
        made(IMAGE, &inputs.tree, &inputs.image)?;
        Ok(inputs)
    }
}

/// Makes a volume in "$1", mounts it at "$2" with the options "$3", and runs the rest there.
/// Direct I/O avoids the second cache of a buffered loop device. At the end, also after a failure,
/// it unmounts and detaches.
const WITH_VOLUME: &str = r#"
set -eu
image=$1 mnt=$2 options=$3; shift 3
truncate -s 8G "$image"
mkfs.btrfs -q "$image"
loop=$(losetup --find --show --direct-io=on "$image")
trap 'umount "$mnt" || true; losetup --detach "$loop"' EXIT
mount -t btrfs -o "$options" "$loop" "$mnt"
(cd "$mnt" && eval "$1")
"#;

/// A side of a job: the job, the side, whether its volume has the files of the tree as they are,
/// and the command that makes the volume at a path.
struct BuildSide<'a> {
    job: String,
    name: String,
    is_tree: bool,
    make: Box<dyn Fn(&Path) -> Command + 'a>,
}

/// How volumes of a job are compressed.
#[derive(Clone, Copy)]
struct BuildCompression {
    /// Behind the name of the job.
    name: &'static str,
    /// For ours, and for `mkfs.btrfs`.
    option: Option<&'static str>,
    /// For a mount.
    mount: &'static str,
}

const COMPRESSIONS: [BuildCompression; 2] = [
    BuildCompression { name: "", option: None, mount: "noatime" },
    BuildCompression {
        name: " zstd:3",
        option: Some("--compress=zstd:3"),
        mount: "noatime,compress=zstd:3",
    },
];

fn sides<'a>(
    options: &'a SourceBenchOptions,
    inputs: &'a BuildInputs,
    mnt: &'a Path,
) -> Vec<BuildSide<'a>> {
    let version = run_program("mkfs.btrfs", &["--version"]);
    let version = version.split_whitespace().find_map(|word| word.strip_prefix('v')).unwrap_or("");
    // It writes its help to standard error.
    let help = command("mkfs.btrfs").arg("--help").output();
    let compresses =
        help.is_ok_and(|help| String::from_utf8_lossy(&help.stderr).contains("--compress "));
    let mut sides = Vec::new();
    for compression in COMPRESSIONS {
        let for_mkfs = compression.option.filter(|_| compresses).unwrap_or("");
        let lacks = if compression.option.is_some() && !compresses { ", plain" } else { "" };
        let mkfs = format!("mkfs.btrfs {version}{lacks}");
        let kernel = move |script: String| {
            move |image: &Path| {
                let mut sh = command("sh");
                sh.args(["-c", WITH_VOLUME, "sh"]).arg(image).arg(mnt);
                sh.args([compression.mount, &script]);
                sh
            }
        };
        let ours = |source: String| {
            move |image: &Path| {
                let mut ours = Command::new(&options.offshoot);
                ours.arg("build").arg(image).args(["--from", &source]).args(compression.option);
                ours
            }
        };
        let script = |script: String| {
            move |image: &Path| {
                let mut sh = command("sh");
                sh.args(["-c", &script, "sh"]).arg(image);
                sh
            }
        };
        let mut add = |job: &str, name: &str, make: Box<dyn Fn(&Path) -> Command + 'a>| {
            let job = format!("{job}{}", compression.name);
            let is_tree = !job.starts_with("layers") || name != "podman";
            sides.push(BuildSide { job, name: name.to_owned(), is_tree, make });
        };
        let (tree, archive) = (inputs.tree.display(), inputs.archive.display());
        add("directory", "ours", Box::new(ours(tree.to_string())));
        let from_tree = format!("mkfs.btrfs -q {for_mkfs} --rootdir '{tree}' \"$1\"");
        add("directory", &mkfs, Box::new(script(from_tree)));
        add("directory", "kernel + cp -a", Box::new(kernel(format!("cp -a '{tree}/.' ."))));
        add("archive", "ours", Box::new(ours(archive.to_string())));
        let from_archive = format!(
            "set -eu; mkdir \"$1.tree\"; tar -xf '{archive}' -C \"$1.tree\"; \
             mkfs.btrfs -q {for_mkfs} --rootdir \"$1.tree\" \"$1\""
        );
        add("archive", &format!("tar + {mkfs}"), Box::new(script(from_archive)));
        add("archive", "kernel + tar", Box::new(kernel(format!("tar -xf '{archive}'"))));
        let image = inputs.image.display();
        add("layers", "ours", Box::new(ours(format!("oci:{image}"))));
        if try_run("podman", &["--version"]).is_ok() {
            let load = format!(
                "podman --root \"$PWD/root\" --runroot \"$PWD/run\" --storage-driver btrfs \
                 pull -q 'oci:{image}'"
            );
            add("layers", "podman", Box::new(kernel(load)));
        }
    }
    sides
}

/// Runs every side in turns.
fn run_sides(options: &SourceBenchOptions, inputs: &BuildInputs) -> Result<Vec<SideRuns>> {
    let (outputs, mnt) = (options.dir.join("out"), options.dir.join("mnt"));
    clear(&outputs)?;
    fs::create_dir_all(&mnt).map_err(|error| format!("{}: {error}", mnt.display()))?;
    let expected = entries(&inputs.tree)?;
    let sides = sides(options, inputs, &mnt);
    let mut runs: Vec<_> = sides
        .iter()
        .map(|side| SideRuns { job: side.job.clone(), name: side.name.clone(), runs: Vec::new() })
        .collect();
    for round in 0..options.rounds {
        for (side, runs) in sides.iter().zip(&mut runs) {
            let (job, name) = (&side.job, &side.name);
            eprintln!("round {} of {}: {job}: {name}", round + 1, options.rounds);
            fs::create_dir_all(&outputs)
                .map_err(|error| format!("{}: {error}", outputs.display()))?;
            let image = outputs.join("image");
            runs.runs.push(run(&mut (side.make)(&image))?);
            let built = MountedMembers::try_new(std::slice::from_ref(&image), "ro,noatime")?;
            let count = entries(built.path())?;
            drop(built);
            // A side that leaves files out would win unfairly.
            if side.is_tree && count != expected {
                return Err(format!("{job}: {name} made {count} entries of {expected}"));
            }
            clear(&outputs)?;
        }
    }
    Ok(runs)
}

/// Prepares the inputs, runs all sides in turns, prints the table.
fn all(options: &SourceBenchOptions) -> Result {
    let _judges = judges::require().ok_or("the peers mount volumes, which takes root")?;
    fs::create_dir_all(&options.dir)
        .map_err(|error| format!("{}: {error}", options.dir.display()))?;
    let inputs = BuildInputs::prepare(options)?;
    let sides = run_sides(options, &inputs)?;
    table::print(&sides);
    let json = options.dir.join("build.json");
    table::write_json(&json, &sides)?;
    println!("all runs: {}", json.display());
    Ok(())
}
