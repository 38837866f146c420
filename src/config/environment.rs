//! The process environment. Nothing else in the project reads it.

use std::collections::BTreeMap;
use std::fmt;

use super::problem::Error;
use super::tables::EndpointConfig;

/// Variables that begin with `LONGSTRAW_` and name no key, with their meaning.
pub const OTHER_VARIABLES: &[(&str, &str)] = &[
    ("LONGSTRAW_FORCE", "`1` lets a gate run although the gate before it has not passed"),
    ("LONGSTRAW_LOG", "level of the logs, or filters `module=level,…`; overrides `run.log_level`"),
];

/// A value that no output shows.
#[derive(Clone, Eq, PartialEq)]
pub struct Secret(String);

impl Secret {
    /// The value itself, for the request header alone.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

/// The proxy that addresses of one kind are reached through.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ProxyAddress {
    /// The proxy's address; it may hold a password.
    pub address: Secret,
    /// Hosts that are reached without it.
    pub except: Vec<String>,
}

/// How many tasks the launcher says it started.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LauncherTasks {
    /// The variable that reports it.
    pub variable: &'static str,
    /// Number of tasks of the job.
    pub tasks: u64,
}

/// Variables with the address of a proxy, in capitals; each is read in small letters too.
const PROXIES: [&str; 3] = ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"];

/// A copy of the environment, made once. It may hold secrets, so its debug form shows none of it.
#[derive(Clone, Default)]
pub struct Environment {
    variables: BTreeMap<String, String>,
}

impl EndpointConfig {
    /// The variables that may hold secrets: the key's, and those of proxies, whose addresses may hold a password. No program
    /// that a run starts gets them.
    #[must_use]
    pub fn secret_variables(&self) -> Vec<String> {
        let proxies = PROXIES.iter().flat_map(|name| [(*name).to_owned(), name.to_lowercase()]);
        [self.api_key_env.clone()].into_iter().chain(proxies).collect()
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Environment({} variables)", self.variables.len())
    }
}

impl Environment {
    /// The environment of this process. A variable whose name is not UTF-8 is left out.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one reader of the environment")]
    pub fn process() -> Self {
        let pairs = std::env::vars_os();
        let text = pairs.filter_map(|(n, v)| Some((n.into_string().ok()?, v.to_string_lossy().into_owned())));
        Environment { variables: text.collect() }
    }

    /// An environment of these variables alone.
    pub fn of<N: Into<String>, V: Into<String>>(pairs: impl IntoIterator<Item = (N, V)>) -> Self {
        Environment { variables: pairs.into_iter().map(|(n, v)| (n.into(), v.into())).collect() }
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(|v| v.trim()).filter(|v| !v.is_empty())
    }

    /// The variables that should name a key, in the order of their names.
    pub(super) fn keys(&self, api_key_env: &str) -> impl Iterator<Item = (&str, &str)> {
        let other = move |name: &str| OTHER_VARIABLES.iter().any(|(n, _)| *n == name) || name == api_key_env;
        let ours = self.variables.iter().filter(|(name, _)| name.starts_with("LONGSTRAW_"));
        ours.filter(move |(name, _)| !other(name)).map(|(n, v)| (n.as_str(), v.as_str()))
    }

    /// The number of tasks that the launcher reports: mpirun's `OMPI_COMM_WORLD_SIZE`, else
    /// `SLURM_STEP_NUM_TASKS`. Absent where neither is set to a number.
    #[must_use]
    pub fn launcher_tasks(&self) -> Option<LauncherTasks> {
        let said = |variable: &'static str| {
            let tasks = self.get(variable)?.parse().ok()?;
            Some(LauncherTasks { variable, tasks })
        };
        said("OMPI_COMM_WORLD_SIZE").or_else(|| said("SLURM_STEP_NUM_TASKS"))
    }

    /// Threads a rank may use as the user has set them; absent: nobody has chosen.
    #[must_use]
    pub fn omp_num_threads(&self) -> Option<u64> {
        self.get("OMP_NUM_THREADS")?.parse().ok()
    }

    /// The proxy for `base`, from the variables that other clients read too: `HTTPS_PROXY` or `HTTP_PROXY` by the kind of
    /// address, else `ALL_PROXY`, in capitals or not; `NO_PROXY` lists exceptions.
    #[must_use]
    pub fn proxy(&self, base: &str) -> Option<ProxyAddress> {
        let either = |name: &str| self.get(name).or_else(|| self.get(&name.to_lowercase()));
        let [https, http, all] = PROXIES;
        let own = if base.starts_with("https://") { https } else { http };
        let address = Secret(either(own).or_else(|| either(all))?.to_owned());
        let except = either("NO_PROXY").unwrap_or_default().split(',').map(|host| host.trim().to_owned());
        Some(ProxyAddress { address, except: except.filter(|host| !host.is_empty()).collect() })
    }

    /// Whether the order of gates is waived: `LONGSTRAW_FORCE=1`.
    #[must_use]
    pub fn force(&self) -> bool {
        self.get("LONGSTRAW_FORCE").is_some_and(|v| v == "1")
    }

    /// `LONGSTRAW_LOG`, where set.
    #[must_use]
    pub fn log(&self) -> Option<&str> {
        self.get("LONGSTRAW_LOG")
    }

    /// The endpoint's key, from the variable that `api_key_env` names.
    ///
    /// # Errors
    /// [`Error::NoApiKey`] where the variable is absent or empty, [`Error::BadApiKey`] where no request header takes it.
    pub fn api_key(&self, endpoint: &EndpointConfig) -> Result<Secret, Error> {
        let variable = &endpoint.api_key_env;
        let key = self.get(variable).ok_or_else(|| Error::NoApiKey { variable: variable.clone() })?;
        if key.bytes().all(|b| b.is_ascii_graphic()) {
            Ok(Secret(key.to_owned()))
        } else {
            Err(Error::BadApiKey { variable: variable.clone() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpirun_overrides_slurm_and_words_are_no_numbers() {
        let both = Environment::of([("OMPI_COMM_WORLD_SIZE", "8"), ("SLURM_STEP_NUM_TASKS", "2")]);
        assert_eq!(both.launcher_tasks(), Some(LauncherTasks { variable: "OMPI_COMM_WORLD_SIZE", tasks: 8 }));
        let slurm = Environment::of([("OMPI_COMM_WORLD_SIZE", "many"), ("SLURM_STEP_NUM_TASKS", "2")]);
        assert_eq!(slurm.launcher_tasks(), Some(LauncherTasks { variable: "SLURM_STEP_NUM_TASKS", tasks: 2 }));
        assert_eq!(Environment::default().launcher_tasks(), None);
    }

    #[test]
    fn an_empty_variable_counts_as_not_set() {
        let environment = Environment::of([("LONGSTRAW_LOG", " "), ("LONGSTRAW_FORCE", "0"), ("OMP_NUM_THREADS", "")]);
        assert_eq!(environment.log(), None);
        assert!(!environment.force());
        assert_eq!(environment.omp_num_threads(), None);
        assert!(Environment::of([("LONGSTRAW_FORCE", "1")]).force());
    }

    #[test]
    fn programs_get_neither_the_key_nor_the_address_of_a_proxy() {
        let endpoint =
            EndpointConfig { api_key_env: "OWN_KEY".to_owned(), ..crate::config::RunConfig::laptop().endpoint };
        let removed = ["OWN_KEY", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
        assert_eq!(endpoint.secret_variables(), removed);
    }

    #[test]
    fn a_secret_shows_nothing_of_itself() {
        let secret = Secret("sk-sentinel".to_owned());
        assert_eq!(format!("{secret} {secret:?} {:?}", Some(&secret)), "[secret] [secret] Some([secret])");
        assert_eq!(secret.expose(), "sk-sentinel");
        let environment = Environment::of([("KEY", "sk-sentinel")]);
        assert_eq!(format!("{environment:?}"), "Environment(1 variables)");
    }
}
